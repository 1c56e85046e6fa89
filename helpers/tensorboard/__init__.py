"""Starts, shows and stops this reader's own TensorBoard, with its profiler tab corrected.

TensorBoard runs in a process of its own, listens on 127.0.0.1 on a port that the operating system has found free, and
ends with the process that started it. `corrections` has what is corrected and why.
"""

from __future__ import annotations

import gzip
import html
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from helpers import config, traces
from helpers.tensorboard import corrections
from helpers.wording import counted

TIMEOUT = 120  # seconds: thirty readers may start theirs at once, each taking 2 s of the machine's cores
SCALE = 0.72  # the Overview needs 1,200 pixels, and a notebook has about 880: narrower, its panels overlap
PLUGIN = "data/plugin/pytorch_profiler"

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy for the internet cannot see 127.0.0.1
_shown: Server | None = None


class TensorBoardFailed(RuntimeError):
    """TensorBoard did not start, or did not read the traces."""


@dataclass(frozen=True)
class Server:
    """A running TensorBoard.

    Attributes
    ----------
    logdir : Path
    runs : tuple of str
        The runs it shows, as the profiler tab names them.
    url : str
        Its address on this machine, such as ``http://127.0.0.1:40123/``.
    process : subprocess.Popen
    folder : Path
        Its address, log and temporary files; goes when it ends.
    owner : int
        Number of the process that started it: the only one that may stop it.
    """

    logdir: Path
    runs: tuple[str, ...]
    url: str
    process: subprocess.Popen
    folder: Path
    owner: int

    @property
    def link(self) -> str:
        """Where a browser finds the profiler tab: behind a proxy, such as JupyterHub's, a path."""
        return f"{config.address(urlsplit(self.url).port)}#pytorch_profiler"

    def get(self, page: str, **query: str):
        """Ask the profiler's plugin, as its page does: ``server.get("views", run="one-worker")``."""
        return _get(self.url, page, **query)

    def stop(self) -> None:
        """End this TensorBoard. Does nothing in a fork of the process that started it."""
        if self.owner == os.getpid():
            _end(self.process, self.folder)


def show(logdir: str | Path, *, height: int = 800) -> None:
    """Start TensorBoard over `logdir`, wait until the profiler tab has all runs, print the link and embed the page.

    It replaces the one shown before: a running TensorBoard does not notice traces added to a run it knows. It ends
    with this notebook's kernel, or by `stop`.

    Parameters
    ----------
    logdir : str or Path
        Folder with the traces of one run, or of several in folders of their own.
    height : int
        Height of the embedded page in pixels.

    Raises
    ------
    NoTraces
        If there are no traces in `logdir`.
    TensorBoardFailed
        If TensorBoard does not start or does not read the traces.
    """
    global _shown
    server = start(logdir)
    stop()
    _shown = server
    _announce(server)
    if config.in_colab():
        _embed_by_colab(server, height)
    elif "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        from IPython.display import HTML, display

        link = html.escape(server.link, quote=True)
        display(
            HTML(
                f'<p><a href="{link}" target="_blank">Open TensorBoard in a tab of its own</a></p>'
                f'<div style="height: {height}px; overflow: hidden"><iframe src="{link}" title="TensorBoard" '
                f'style="border: 0; width: {1 / SCALE:.2%}; height: {height / SCALE:.0f}px; '
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
    """Run TensorBoard over `logdir` in the foreground, until Ctrl-C.

    Raises
    ------
    NoTraces, TensorBoardFailed
        As `show`.
    """
    server = start(logdir)
    try:
        _announce(server)
        print("Press Ctrl-C to end it.", flush=True)
        server.process.wait()
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
    """
    logdir = Path(logdir).resolve()
    runs = _runs(logdir)
    if (problem := corrections.uncorrectable()) is not None:
        print(problem)
    folder = Path(tempfile.mkdtemp(prefix="tensorboard-"))
    process = _launch(logdir, folder)
    try:
        deadline = time.monotonic() + TIMEOUT
        url = _wait_for_address(process, folder, deadline)
        _wait_for_runs(process, folder, url, runs, deadline)
    except BaseException:  # a KeyboardInterrupt, too, must not leave it behind
        _end(process, folder)
        raise
    return Server(logdir, tuple(sorted(runs)), url, process, folder, os.getpid())


def load_ipython_extension(shell) -> None:
    """Give a notebook the magic ``%tensorboard``: IPython calls this at ``%load_ext helpers.tensorboard``."""
    from helpers.tensorboard import magic  # here, because a shell has no need of IPython

    magic.register(shell)


def _embed_by_colab(server: Server, height: int) -> None:
    """Embed the page by Colab's own function: nobody else reaches its machine, and a link fails for lack of cookies."""
    from google.colab import output

    path = f"/#{urlsplit(server.link).fragment}"
    output.serve_kernel_port_as_iframe(urlsplit(server.url).port, path=path, height=str(height))


def _announce(server: Server) -> None:
    where = "in the frame below, through Colab's proxy" if config.in_colab() else f"at {server.link}"
    print(f"TensorBoard shows {counted(len(server.runs), 'run')} of {server.logdir} {where}", flush=True)
    for run in server.runs:
        if not server.get("views", run=run):
            print(f"It could not read the trace of {run}: helpers.traces.load({str(server.logdir)!r}) says why.")


def _runs(logdir: Path) -> set[str]:
    """Return the runs in `logdir` as the plugin names them."""
    names = {str(folder.relative_to(logdir)) for folder in traces.runs(logdir)}
    return {logdir.name if name == "." else name for name in names}


def _launch(logdir: Path, folder: Path) -> subprocess.Popen:
    # A group of its own, so that interrupting the notebook's kernel does not end TensorBoard.
    group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if os.name == "nt" else {"start_new_session": True}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "helpers.tensorboard.child", str(logdir), str(folder), str(os.getpid())],
            cwd=config.PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            **group,
        )


def _wait_for_address(process: subprocess.Popen, folder: Path, deadline: float) -> str:
    while not (folder / "address").exists():
        _check(process, folder, deadline, "did not start")
        time.sleep(0.02)
    return (folder / "address").read_text()


def _wait_for_runs(process: subprocess.Popen, folder: Path, url: str, runs: set[str], deadline: float) -> None:
    missing_since = None
    while True:
        answer = _get(url, "runs")
        missing = runs - set(answer["runs"])
        if not answer["loading"] and not missing:
            return
        # A run is out of loading a moment before it is listed, and before loading has begun.
        waiting = answer["loading"] or not answer["runs"]
        missing_since = None if waiting else missing_since or time.monotonic()
        _check(process, folder, deadline, f"did not list {', '.join(sorted(missing or runs))}")
        if missing_since is not None and time.monotonic() > missing_since + 5:
            raise TensorBoardFailed(f"TensorBoard cannot read {', '.join(sorted(missing))}. {_last_lines(folder)}")
        time.sleep(0.05)


def _check(process: subprocess.Popen, folder: Path, deadline: float, fault: str) -> None:
    if process.poll() is not None:
        raise TensorBoardFailed(f"TensorBoard ended with code {process.returncode}. {_last_lines(folder)}")
    if time.monotonic() > deadline:
        raise TensorBoardFailed(
            f"TensorBoard {fault} within {TIMEOUT} s. Show fewer or smaller traces, or try again when this machine "
            f"has less to do. {_last_lines(folder)}"
        )


def _last_lines(folder: Path) -> str:
    try:
        lines = (folder / "log").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    return "Its last words:\n" + "\n".join(lines[-20:])


def _get(url: str, page: str, **query: str):
    words = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
    with _direct.open(f"{url}{PLUGIN}/{page}?{words}", timeout=TIMEOUT) as answer:
        content = answer.read()
        return json.loads(gzip.decompress(content) if answer.headers["Content-Encoding"] == "gzip" else content)


def _end(process: subprocess.Popen, folder: Path) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
