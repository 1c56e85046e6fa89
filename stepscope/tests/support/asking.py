"""Asks a running TensorBoard for the data of the profiler tab's views, as its page does: ours, or one as installed."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from stepscope import tensorboard, traces
from stepscope.base.child import Child

STOCK = """
import sys
from pathlib import Path
from stepscope.tensorboard import corrections, plugin
corrections.apply = lambda: None
plugin.main(sys.argv[1], Path(sys.argv[2]))
"""


@contextmanager
def stock_tensorboard(logdir, runs):
    """Run TensorBoard over the `runs` in `logdir`, with the profiler's plugin as it is installed."""
    folder = Path(tempfile.mkdtemp())  # not pytest's: the plugin's sockets want a short path
    child = Child(["-c", STOCK, logdir, folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = tensorboard.Server(logdir, tuple(runs), "", child, folder)
    try:
        server.wait()
        yield server
    finally:
        child.stop()  # it removes the folder


def ask(server, page, run, view="Overview", **query):
    """Ask for the data of a view, of a run's only worker and span."""
    (worker,) = server.get("workers", run=run, view=view)
    (span,) = server.get("spans", run=run, worker=worker)
    return server.get(page, run=run, worker=worker, span=span, **query)


def overview(server, run, worker=None):
    """Return the Overview's steps, of all spans: a list of (number, {category: µs}). A run may have several workers."""
    if worker is None:
        (worker,) = server.get("workers", run=run, view="Overview")
    spans = server.get("spans", run=run, worker=worker)
    tables = [server.get("overview", run=run, worker=worker, span=span)["steps"] for span in spans]
    steps = []
    for table in tables:
        names = [column.get("name") for column in table["columns"]]
        steps += [dict(zip(names, row, strict=True)) for row in table["rows"]]
    return [(int(step["Step"]), {name: step[name] for name in step if name in traces.CATEGORIES}) for step in steps]


PARSE = """
import logging, pickle, sys, tempfile
logging.disable(logging.ERROR)
from stepscope.tensorboard import corrections
corrections.apply()
from torch_tb_profiler.profiler.data import RunProfileData
from torch_tb_profiler.profiler.run_generator import RunGenerator
for file in sys.argv[2:]:
    data = RunProfileData.parse("worker", None, file, tempfile.gettempdir())
    page = RunGenerator("worker", None, data).generate_run_profile()
    pickle.dump(eval(sys.argv[1]), sys.stdout.buffer)
"""


def parsed_by_the_plugin(files, wanted):
    """Return what the corrected plugin makes of each file, an expression of its `data` and `page`; without a server."""
    command = [sys.executable, "-c", PARSE, wanted, *files]
    output = io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout)
    return [pickle.load(output) for _ in files]
