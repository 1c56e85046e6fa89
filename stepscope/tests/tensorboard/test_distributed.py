"""The Distributed view equals `traces.communication`: of simulated jobs, whose truth is known, and of real ranks."""

import gzip
import json

import pytest
from support import rank_traces
from support.written import event, write

from stepscope import tensorboard, traces

pytestmark = pytest.mark.processes

LATE = [[[300, 200], [300, 210]], [[600, 200], [600, 210]]]  # µs of two ranks, two steps, two buckets: rank 1 is late


def change(folder, edit, rank=1):
    """Change the trace of a rank: `edit` gets its content and changes it."""
    path = folder / f"rank_{rank}.1.pt.trace.json.gz"
    content = json.loads(gzip.decompress(path.read_bytes()))
    edit(content)
    path.write_bytes(gzip.compress(json.dumps(content).encode(), 1))


def without_kernels(content):
    content["traceEvents"] = [each for each in content["traceEvents"] if each.get("cat") != "kernel"]
    call = next(each for each in content["traceEvents"] if each["name"] == "record_param_comms")
    content["traceEvents"].append(call | {"name": "nccl:all_reduce"})


def later_steps(content):
    for each in content["traceEvents"]:
        if each["name"].startswith("ProfilerStep#"):
            each["name"] = f"ProfilerStep#{int(each['name'].partition('#')[2]) + 1}"


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    job = rank_traces.job(LATE, transfer=70)
    clocks = [0, 5e6]  # rank 1's is 5 s ahead
    for run in ("gloo", "alone", "same-rank", "other-steps", "damaged"):
        rank_traces.write(root / run, job, clocks=clocks)
    for run in ("nccl", "no-kernels"):
        rank_traces.write(root / run, job, clocks=clocks, backend="nccl")
    rank_traces.write(root / "some", rank_traces.job([*LATE, LATE[0]], transfer=70))
    rank_traces.write(root / "unequal", job, clocks=clocks, leave_out={1: [3]})
    rank_traces.write(root / "no-sizes", job, shapes=False)
    rank_traces.write(root / "no-steps", job, marked=False)
    for run in ("alone", "some"):
        sorted((root / run).iterdir())[-1].unlink()
    change(root / "same-rank", lambda content: content["distributedInfo"].update(rank=0))
    change(root / "other-steps", later_steps)
    for rank in (0, 1):
        change(root / "no-kernels", without_kernels, rank)
    (root / "single").mkdir()
    write(root / "single" / "host_1.1.pt.trace.json", [event("cpu_op", "aten::mm", 0, 10)])
    (root / "damaged" / "rank_1.1.pt.trace.json.gz").write_bytes(b"damaged")
    rank_traces.write(root / "all-to-all", rank_traces.job(LATE, transfer=70, kind=("all_to_all", 1000)))
    return root


@pytest.fixture(scope="module")
def ours(logdir):
    server = tensorboard.start(logdir)
    yield server
    server.stop()


def ask(server, run, page):
    (span,) = server.get("spans", run=run, worker="All")
    return server.get(f"distributed/{page}", run=run, worker="All", span=span)


def waits(server, run):
    """Return by step and worker the µs of data transfer and synchronizing."""
    return ask(server, run, "waittime")["data"]


def operations(server, run, worker):
    """Return by name calls, total and average size, latency and data transfer."""
    return {name: row for name, *row in ask(server, run, "commops")["data"][worker]["rows"]}


def note(server, run):
    return ask(server, run, "overlap")["metadata"]["note"]


def test_the_view_exists_for_jobs_but_not_for_a_single_process(ours, logdir):
    for run in (folder.name for folder in logdir.iterdir()):
        assert ("Distributed" in ours.get("views", run=run)) == (run != "single"), run


@pytest.mark.parametrize("run", ["gloo", "nccl", "unequal", "all-to-all"])
def test_the_numbers_equal_traces_communication(ours, logdir, run):
    table = traces.communication(logdir / run)
    assert (note(ours, run) is None) == (run != "unequal")
    steps = len(overlap_steps := ask(ours, run, "overlap")["data"]) - 1
    for (worker, parts), (_, row) in zip(overlap_steps["all"].items(), table.iterrows(), strict=True):
        compute, both, alone, other = (part / 1e3 for part in parts)
        expected = row[["compute", "overlapped", "exposed"]].to_list()
        assert [compute + other, both, alone] == pytest.approx(expected, abs=1e-5)
        assert waits(ours, run)["all"][worker] == pytest.approx([1e3 * row["transfer"], 1e3 * row["waiting"]], abs=0.01)
        rows = operations(ours, run, worker).values()
        assert sum(row[0] for row in rows) / steps == row["collectives"]
        if all(row[1] is not None for row in rows):
            assert sum(row[1] for row in rows) / steps / 1e6 == pytest.approx(row["megabytes"])


def test_the_table_counts_and_sizes_the_operations_and_their_transfers(ours):
    """Of each step's two operations the first waits for rank 1 on rank 0, and the second follows it on both."""
    for worker, latency in (("rank_0", 2 * (300 + 70 + 200)), ("rank_1", 4 * 70)):
        name, row = next(iter(operations(ours, "gloo", worker).items()))
        assert (name, row[:3]) == ("gloo:all_reduce", [4, 4e6, 1e6])
        assert row[5:] == [4 * 70, 70]
        assert row[3] >= latency - 2 * 200


@pytest.mark.parametrize(
    ("run", "compares", "says"),
    [
        ("alone", False, "1 of 2 ranks"),
        ("some", True, "2 of 3 ranks"),
        ("same-rank", False, "recorded as rank 0"),
        ("other-steps", True, "(rank_0: 3, 4; rank_1: 4, 5)"),
        ("unequal", True, "step 4: rank_1 has 1"),
        ("no-kernels", True, "ProfilerActivity.CUDA"),
        ("no-sizes", True, "record_shapes=True"),
        ("no-steps", False, "profiler.step()"),
        ("damaged", False, "1 of 2 ranks"),
    ],
)
def test_data_that_cannot_be_compared_are_left_out_and_the_note_says_why(ours, run, compares, says):
    assert says in note(ours, run)
    assert (len(waits(ours, run)["all"]) > 0) == compares
    if not compares and run != "no-steps":
        assert all(row[5] is None for row in operations(ours, run, "rank_0").values())


def test_only_steps_that_all_ranks_have_are_compared(ours):
    assert list(waits(ours, "other-steps")) == ["all", "4"]
    assert set(ask(ours, "other-steps", "overlap")["data"]) == {"all", "3", "4", "5"}
