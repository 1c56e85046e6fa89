"""Starts, shows and stops a TensorBoard of this user, with its profiler tab corrected.

TensorBoard runs in its own process, listens on 127.0.0.1 on a port that the operating system has found free, and ends
with the process that started it. Other users of the machine can reach this port, and TensorBoard asks for no password.
So its pages lie below a random path, without which it answers 404. `corrections` states each correction and its reason.
"""

import gzip
import html
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from stepscope import traces
from stepscope.base import machine
from stepscope.base.child import Child
from stepscope.base.wording import counted
from stepscope.tensorboard import corrections

TIMEOUT = 120  # seconds: thirty users may start theirs at once, each taking 2 s of the machine's cores
HEIGHT = 800  # pixels of the embedded page
SCALE = 0.72  # the Overview needs 1,200 pixels, or its panels overlap; a notebook has about 880
PLUGIN = "data/plugin/pytorch_profiler"

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # an internet proxy cannot reach 127.0.0.1


class TensorBoardFailed(RuntimeError):
    """TensorBoard did not start, or did not read the traces."""


@dataclass
class Server:
    """A running TensorBoard."""

    logdir: Path
    runs: tuple[str, ...]  #: The runs it shows, as the profiler tab names them
    #: Its address on this machine, such as ``http://127.0.0.1:40123/SECRET/``: a secret that opens the traces.
    url: str
    child: Child  #: Its process
    folder: Path  #: For its address, log and temporary files, closed to other users; removed at the end

    @property
    def link(self) -> str:
        """URL of the profiler tab for a browser: a path behind a proxy, such as JupyterHub's."""
        url = urlsplit(self.url)
        assert url.port is not None  # `start` has waited for the address
        return f"{machine.address(url.port)}{url.path[1:]}#pytorch_profiler"

    def get(self, page: str, **query: str) -> Any:
        """Ask the profiler's plugin, as its page does: ``server.get("views", run="one-worker")``."""
        with _direct.open(f"{self.url}{PLUGIN}/{page}?{urlencode(query)}", timeout=TIMEOUT) as answer:
            content = answer.read()
            return json.loads(gzip.decompress(content) if answer.headers["Content-Encoding"] == "gzip" else content)

    def stop(self) -> None:
        """End this TensorBoard. Does nothing in a fork of the process that started it."""
        if self.child.stop(5):
            shutil.rmtree(self.folder, ignore_errors=True)  # if the child did not start, or had to be killed

    def wait(self) -> None:
        """Wait until the server has an address, and the profiler tab lists all runs."""
        deadline = time.monotonic() + TIMEOUT
        while not (self.folder / "address").exists():
            self._check(deadline, "did not start")
            time.sleep(0.02)
        self.url = (self.folder / "address").read_text(encoding="utf-8")
        until = math.inf  # a run is not in "loading" before it loads, and just before it is listed
        while (answer := self.get("runs"))["loading"] or not set(self.runs) <= set(answer["runs"]):
            names = ", ".join(sorted(set(self.runs) - set(answer["runs"])) or self.runs)
            until = math.inf if answer["loading"] or not answer["runs"] else min(until, time.monotonic() + 5)
            self._check(min(deadline, until), f"did not list {names}")
            time.sleep(0.05)

    def _check(self, deadline: float, fault: str) -> None:
        if self.child.runs and time.monotonic() <= deadline:
            return
        if self.child.runs:
            problem = f"{fault} in time. Show fewer or smaller traces, or try again when this machine is less busy."
        else:
            problem = f"ended with code {self.child.process.returncode}."
        log = self.folder / "log"  # missing if TensorBoard was ended while it started
        lines = log.read_text(errors="replace", encoding="utf-8").splitlines() if log.exists() else []
        raise TensorBoardFailed("\n".join([f"TensorBoard {problem} The last lines of its log:", *lines[-20:]]))


_shown: Server | None = None


def show(logdir: str | Path) -> None:
    """Start TensorBoard over `logdir`, wait until the profiler tab has all runs, print the link and embed the page.

    It replaces the TensorBoard shown before, which does not notice traces added to a run that it knows. It ends with
    this notebook's kernel, or by `stop`.

    Parameters
    ----------
    logdir : str or Path
        Folder with the traces of one run, or with a folder for each of several runs.

    Raises the errors of `start`.
    """
    global _shown
    server = start(logdir)
    stop()
    _shown = server
    _announce(server)
    if machine.in_colab():  # by Colab's function: only Colab reaches its machine, and links fail for lack of cookies
        from google.colab import output

        url = urlsplit(server.url)
        output.serve_kernel_port_as_iframe(url.port, path=f"{url.path}#pytorch_profiler", height=str(HEIGHT))
    elif "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        from IPython.display import HTML, display

        link = html.escape(server.link, quote=True)
        display(
            HTML(
                f'<p><a href="{link}" target="_blank">Open TensorBoard in a tab of its own</a></p>'
                f'<div style="height: {HEIGHT}px; overflow: hidden"><iframe src="{link}" title="TensorBoard" '
                f'style="border: 0; width: {1 / SCALE:.2%}; height: {HEIGHT / SCALE:.0f}px; '
                f'transform: scale({SCALE}); transform-origin: 0 0"></iframe></div>'
            )
        )


def stop() -> None:
    """End the TensorBoard that `show` started in this process, and no other."""
    global _shown
    if _shown is not None:
        _shown.stop()
        _shown = None


def serve(logdir: str | Path) -> None:
    """Run TensorBoard over `logdir` in the foreground, until Ctrl-C. Raises the errors of `start`."""
    server = start(logdir)
    try:
        _announce(server)
        print("Press Ctrl-C to end it.", flush=True)
        server.child.process.wait()
    except KeyboardInterrupt:
        print()
    finally:
        server.stop()


def start(logdir: str | Path) -> Server:
    """Start a TensorBoard over `logdir` and return it once the profiler tab has all runs.

    Raises
    ------
    NoTraces
        If there are no traces in `logdir`.
    TensorBoardFailed
        If TensorBoard does not start, or does not read the traces within two minutes.
    corrections.PackageMissing
        If a package of stepscope's extra `tab` is not installed, or the plugin has another version.
    """
    corrections.check_packages()
    logdir = Path(logdir).resolve()
    names = {str(folder.relative_to(logdir)) for folder in traces.runs(logdir)}
    runs = {logdir.name if name == "." else name for name in names}  # as the plugin calls them
    # The plugin's sockets are in this folder: their paths may have 104 bytes (macOS; Linux: 108); 53 are added here.
    short = os.name == "nt" or len(os.fsencode(tempfile.gettempdir())) <= 50
    folder = Path(tempfile.mkdtemp(prefix="tensorboard-", dir=None if short else "/tmp"))
    with (folder / "log").open("wb") as log:
        child = Child(["-m", "stepscope.tensorboard.plugin", logdir, folder], stdout=log, stderr=subprocess.STDOUT)
    server = Server(logdir, tuple(sorted(runs)), "", child, folder)
    try:
        server.wait()
    except BaseException:  # a KeyboardInterrupt must not leave it running either
        server.stop()
        raise
    return server


def _announce(server: Server) -> None:
    where = "in the frame below, through Colab's proxy" if machine.in_colab() else f"at {server.link}"
    print(f"TensorBoard shows {counted(len(server.runs), 'run')} of {server.logdir} {where}", flush=True)
    for run in server.runs:
        if not server.get("views", run=run):
            print(f"The trace of {run} could not be read: stepscope.traces.load({str(server.logdir)!r}) shows why.")
