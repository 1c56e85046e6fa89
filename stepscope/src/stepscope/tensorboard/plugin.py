"""TensorBoard with its profiler tab corrected: as a separate process, or as every TensorBoard of an environment.

``python -m stepscope.tensorboard.plugin LOGDIR FOLDER``, started as a `child.Child`, runs it on a port that the
operating system chooses, as long as its owner lives. FOLDER holds its address, its log and its temporary files.
"""

import argparse
import os
import secrets
import sys
import tempfile
from pathlib import Path

from tensorboard.plugins import base_plugin

from stepscope.base import child, staging
from stepscope.tensorboard import corrections


class Corrections(base_plugin.TBLoader):  # type: ignore[misc]
    """Corrects the profiler tab of every TensorBoard that starts in an environment, also by ``tensorboard`` in a shell.

    TensorBoard finds this class by an entry point of the group ``tensorboard_plugins``. stepscope itself declares none:
    an environment that wants the corrections declares ``stepscope.tensorboard.plugin:Corrections``. No tab is added.
    """

    def fix_flags(self, flags: argparse.Namespace) -> None:
        """Apply the corrections when TensorBoard has read its options, before it loads plugins; print the result."""
        try:
            corrections.check_packages()
        except corrections.PackageMissing as error:
            print(f"The profiler tab is not corrected. {error}")
        else:
            corrections.apply()
            print("The profiler tab is corrected by stepscope.")

    def load(self, context: base_plugin.TBContext) -> None:
        """Load nothing."""


def main(logdir: str, folder: Path) -> None:
    """Run TensorBoard over `logdir` until the owner of this process stops it, or ends."""
    tempfile.tempdir = str(folder)  # so that the plugin's leftovers are removed with the folder
    thread = child.end_with_owner(folder=folder)
    # The traces are parsed in separate processes. Forking them saves 7 s, but is safe only on Linux.
    os.environ["TORCH_PROFILER_START_METHOD"] = "fork" if sys.platform == "linux" else "spawn"
    from tensorboard.plugins.core.core_plugin import CorePluginLoader
    from tensorboard.program import TensorBoard
    from torch_tb_profiler.plugin import TorchProfilerPlugin

    corrections.apply()
    # Only the profiler's plugin, and no data server, which is for scalars: 0.5 s faster, and one process less.
    board = TensorBoard(plugins=[CorePluginLoader(), TorchProfilerPlugin])
    # Made here, since all users can read the arguments of a process
    secret = f"/{secrets.token_urlsafe()}"
    board.configure(logdir=logdir, host="127.0.0.1", port=0, path_prefix=secret, load_fast="false", reload_interval=0)
    staging.write(folder / "address", board.launch())
    while thread.is_alive():
        thread.join(1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
