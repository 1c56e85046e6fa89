"""What is read from files that anybody may have written or damaged: each is read, or refused by an error of ours."""

import gzip
import json

import pytest
from support import cuda_trace, damage, rank_traces

from stepscope import diagnosis, report
from stepscope.diagnosis import Diagnosis, Finding
from stepscope.tensorboard import corrections
from stepscope.traces import TraceError, collectives, events, ranks
from stepscope.traces import report as tables

pytestmark = pytest.mark.processes
JOB = [[[50], [60]], [[70], [50]]]  # µs of two ranks in two steps


def of_a_rank(folder, backend):
    """Return the trace of the second of two ranks; that of the first lies in the folder."""
    rank_traces.write(folder, rank_traces.job(JOB, 20), backend=backend)
    second = folder / "rank_1.1.pt.trace.json.gz"
    content = json.loads(gzip.decompress(second.read_bytes()))
    second.unlink()
    return content


def shown(path):
    tables.show(path)
    diagnosis.show(path)


def corrected(path):
    copies = path.parents[1] / "copies"
    for copy in corrections.write_copies(path.parent, copies)[0]:
        copy.unlink()


FINDING = Finding("loader.slow", "slow", "loading", 0.5, "It waits.", "cache(…)", "caching", "train.py:7: read()")
FOUND = Diagnosis("loading", "It waits.", 2.0, (("a", "b"),), (FINDING,), ("c",), steps=((1.0, 2.0), (0.5, 2.5)))
READERS = {
    "trace of a GPU": (lambda folder: cuda_trace.trace(), shown, TraceError),
    "trace of a GPU, corrected": (lambda folder: cuda_trace.trace(), corrected, TraceError),
    "trace of a rank, gloo": (
        lambda folder: of_a_rank(folder, "gloo"),
        lambda path: tables.together(ranks(path.parent)),
        TraceError,
    ),
    "trace of a rank, NCCL": (
        lambda folder: of_a_rank(folder, "nccl"),
        lambda path: diagnosis.of_ranks(path.parent),
        TraceError,
    ),
    "results": (
        lambda folder: {"version": 1, "command": "run", "results": [{"rank": 0, "diagnosis": FOUND.as_json()}]},
        lambda path: (str(report.compare(path, path)), report.page(report.load(path), "")),
        report.ResultError,
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_read_or_refused_by_an_error_of_ours(tmp_path, reader):
    make, read, refused = READERS[reader]
    path = tmp_path / "run" / "rank_1.1.pt.trace.json"
    path.parent.mkdir()
    damage.each(path, [make(path.parent)], lambda path: (events.recorded.cache_clear(), read(path)), refused)


@pytest.mark.parametrize("odd", [1e308, [[None]]])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_odd_arguments_of_an_exchange_are_unknown(tmp_path, backend, odd):
    content, path = of_a_rank(tmp_path, backend), tmp_path / "rank_1.1.pt.trace.json"
    for name in {name for each in content["traceEvents"] for name in each["args"]} | {"Collective name", "Seq"}:
        changed = [each | {"args": each["args"] | {name: odd}} for each in content["traceEvents"]]
        path.write_text(json.dumps(content | {"traceEvents": changed}))
        assert set(collectives(tmp_path)["rank"]) == {"rank 0", "rank 1"}
