"""The Distributed view is right for gloo and NCCL: each fault of the stock plugin, in it and not in ours.

Two TensorBoards run over the same traces: some written by hand, with their truth, and two recorded here by real ranks.
All times are in µs, and those within a trace count from the start of its step.
"""

import json

import pytest
from support import cuda_trace
from support.recordings import read
from support.stock import stock_tensorboard

from helpers import tensorboard, traces
from helpers.training import launching

pytestmark = pytest.mark.processes

LENGTH = 1000
MAIN, GLOO = 100, 101  # threads
FLOATS = {"Input Dims": [[1000]], "Input type": ["float"]}
ELSEWHERE = 5_000_000  # µs: rank 1's clock is ahead by that
RECORD = """
    import gc
    import sys
    import time
    import torch
    import torch.distributed as dist
    import torch.distributed.nn  # before the process group: else DDP imports it, and gloo's threads outlive the group
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for run in ("ddp", "fsdp"):
        layers = [nn.Linear(64, 64) for _ in range(2)]
        if run == "ddp":
            model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
        else:
            model = fully_shard(nn.Sequential(*[fully_shard(layer) for layer in layers]))
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=3),
            record_shapes=True,
            on_trace_ready=tensorboard_trace_handler(f"{sys.argv[1]}/{run}", worker_name=f"rank_{rank}"),
        ) as profiler:
            for _ in range(5):
                if run == "ddp" and rank == 1:
                    time.sleep(0.2)
                model(torch.ones(8, 64)).sum().backward()
                profiler.step()
    del model, layers  # what uses the process group is freed first, or its threads go on
    gc.collect()
    dist.destroy_process_group()
"""


def event(category, name, start, end, thread=MAIN, **arguments):
    return {
        "ph": "X", "cat": category, "name": name, "pid": MAIN, "tid": thread, "ts": start, "dur": end - start,
        "args": arguments,
    }  # fmt: skip


def trace(rank, steps, world=2, **job):
    """A trace of gloo: `steps` has the events of each step by its number."""
    events, clock = [], 1_000_000 + ELSEWHERE * rank
    for number, of_step in steps.items():
        start = clock + LENGTH * number
        events.append(event("user_annotation", f"ProfilerStep#{number}", start, start + LENGTH))
        events += [each | {"ts": each["ts"] + start} for each in of_step]
    for number, each in enumerate(events):
        each["args"] = each["args"] | {"External id": number + 1}
    info = {"backend": "gloo", "rank": rank, "world_size": world, **job}
    return {"schemaVersion": 1, "record_shapes": 1, "distributedInfo": info, "traceEvents": events}


def ddp(late=0, end=900, kind="all_reduce", **tensors):
    """A step: forward, then backward with a hook that issues an exchange, for which it waits itself, optimizer.

    Of 500 µs of exchange, unless the rank is late, 70 are hidden: the operator within the hook. When the rank waits,
    the hook's operator still runs, and nothing within it.
    """
    operator = "allreduce_" if kind == "all_reduce" else "broadcast_"
    return [
        event("cpu_op", "aten::mm", late, late + 300),
        event("cpu_op", "autograd::engine::evaluate_function: Hook", late + 300, late + 500),
        event("cpu_op", "aten::mm", late + 310, late + 380),
        event("cpu_op", f"c10d::{operator}", late + 390, late + 400),
        event("user_annotation", f"gloo:{kind}", late + 400, end, GLOO, **(tensors or FLOATS)),
        event("cpu_op", "aten::mul", late + 410, late + 480),
        event("user_annotation", "Optimizer.step#SGD.step", 930, 980),
    ]


def fsdp(late=0):
    """A step: an operator that gathers and waits, then one that computes with what it has."""
    return [
        event("cpu_op", "c10d::_allgather_base_", late, 300),
        event("user_annotation", "gloo:all_gather", late + 10, 290, GLOO, **FLOATS),
        event("cpu_op", "aten::mm", 300, 900),
    ]


def nccl(rank, gather=False):
    """Rank 1 of the CUDA trace comes 60 µs later to the exchange of each step."""
    content = cuda_trace.trace()
    content["distributedInfo"]["rank"] = rank
    for each in content["traceEvents"]:
        if rank and each["name"] == cuda_trace.ALL_REDUCE:
            each |= {"ts": each["ts"] + 60, "dur": each["dur"] - 60}
        if gather and each["name"] == "nccl:all_reduce":
            each["name"] = "nccl:_all_gather_base"
        if gather and each["name"] == cuda_trace.ALL_REDUCE:
            each["name"] = each["name"].replace("AllReduce_Sum_f32", "AllGather")
    return content


def without(content, category="", name=""):
    kept = [
        each
        for each in content["traceEvents"]
        if not (each.get("cat", "").startswith(category) and each["name"].startswith(name))
    ]
    return content | {"traceEvents": kept}


def barrier_too(content):
    """The same job synchronizes by gloo, too, before its first step."""
    early = event("user_annotation", "gloo:all_reduce", cuda_trace.BEGIN - 50, cuda_trace.BEGIN - 10, GLOO)
    return content | {"traceEvents": [*content["traceEvents"], early]}


TWICE = [*ddp(), event("user_annotation", "gloo:all_reduce", 905, 915, GLOO, **FLOATS)]
GROUPS = {"pg_config": [{"pg_name": "0", "pg_size": 2}, {"pg_name": "1", "pg_size": 1}]}
P2P = [event("user_annotation", "gloo:send", 920, 925, **FLOATS)]
# By run: the files, by their name.
RUNS = {
    "gloo": {"b_0.1": trace(0, {3: ddp(), 4: ddp()}), "a_1.1": trace(1, {3: ddp(late=300), 4: ddp(late=300)})},
    "after-the-step": {f"rank_{r}.1": trace(r, {3: ddp(), 4: ddp(end=1001 if r else 999)}) for r in (0, 1)},
    "fsdp-by-hand": {"rank_0.1": trace(0, {3: fsdp()}), "rank_1.1": trace(1, {3: fsdp(late=100)})},
    "double": {f"rank_{r}.1": trace(r, {3: ddp(**{"Input Dims": [[10]], "Input type": ["double"]})}) for r in (0, 1)},
    "barrier": {f"rank_{r}.1": trace(r, {3: ddp(kind="barrier", late=r)}) for r in (0, 1)},
    "nccl": {f"rank_{r}.1": nccl(r) for r in (0, 1)},
    "nccl-2022": {f"rank_{r}.1": without(nccl(r), category="gpu_user_annotation") for r in (0, 1)},
    "nccl-gather": {f"rank_{r}.1": nccl(r, gather=True) for r in (0, 1)},
    "both": {f"rank_{r}.1": barrier_too(nccl(r)) for r in (0, 1)},
    "unequal": {"rank_0.1": trace(0, {3: ddp(), 4: ddp()}), "rank_1.1": trace(1, {3: ddp(late=300), 4: TWICE})},
    "other-steps": {
        "rank_0.1": trace(0, {3: ddp(late=200), 4: ddp()}),
        "rank_1.1": trace(1, {4: ddp(late=300), 5: ddp(late=400)}),
    },
    "no-step-shared": {"rank_0.1": trace(0, {3: ddp()}), "rank_1.1": trace(1, {4: ddp()})},
    "same-names": {"rank_0.1": trace(0, {3: ddp()}), "rank_0.2": trace(1, {3: ddp(late=300)})},
    "alone": {"rank_0.1": trace(0, {3: ddp()})},
    "some": {"rank_0.1": trace(0, {3: ddp()}, world=4), "rank_1.1": trace(1, {3: ddp(late=300)}, world=4)},
    "one-rank-job": {"rank_0.1": trace(0, {3: ddp()}, world=1)},
    "two-jobs": {"a_1.1": trace(0, {3: ddp()}), "b_1.1": trace(0, {3: ddp()})},
    "idle": {"rank_0.1": trace(0, {3: ddp()}), "rank_1.1": trace(1, {3: ddp()[:1]})},
    "no-kernels": {f"rank_{r}.1": without(nccl(r), name="ncclDev") for r in (0, 1)},
    "groups": {f"rank_{r}.1": trace(r, {3: ddp()}, **GROUPS) for r in (0, 1)},
    "send": {f"rank_{r}.1": trace(r, {3: [*ddp(), *P2P]}) for r in (0, 1)},
    "single": {"host_1.1": {"traceEvents": [event("cpu_op", "aten::mm", 0, 10)]}},
}
RECORDED = ["ddp", "fsdp"]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for run, contents in RUNS.items():
        (root / run).mkdir()
        for name, content in contents.items():
            (root / run / f"{name}.pt.trace.json").write_text(json.dumps(content))
    script = tmp_path_factory.mktemp("script") / "record.py"
    script.write_text("\n".join(line.removeprefix("    ") for line in RECORD.splitlines()))
    launching.torchrun(script, root, timeout=200, quiet=True)
    return root


@pytest.fixture(scope="module")
def ours(logdir):
    server = tensorboard.start(logdir)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def stock(logdir, tmp_path_factory):
    with stock_tensorboard(logdir, [*RUNS, *RECORDED], tmp_path_factory.mktemp("stock")) as server:
        yield server


def ask(server, run, page):
    (span,) = server.get("spans", run=run, worker="All")
    return server.get(f"distributed/{page}", run=run, worker="All", span=span)


def overlap(server, run, step="3"):
    """Return of each worker computation alone, both, communication alone, and neither."""
    return ask(server, run, "overlap")["data"][step]


def waits(server, run):
    """Return by step and worker data transfer and synchronizing."""
    return ask(server, run, "waittime")["data"]


def operations(server, run, worker):
    """Return by name calls, total and average size, latency and data transfer."""
    return {name: row for name, *row in ask(server, run, "commops")["data"][worker]["rows"]}


def note(server, run):
    return ask(server, run, "overlap")["metadata"]["note"]


# ------------------------------------------------------------------------------------------------- gloo, known truth


def test_the_view_is_there_for_all_jobs_and_not_for_a_single_process(ours):
    for run in [*RUNS, *RECORDED]:
        assert ("Distributed" in ours.get("views", run=run)) == (run != "single"), run


def test_the_late_rank_waits_for_nobody_and_the_other_as_long_as_it_was_late(ours):
    """Rank 0 exchanges from 400 to 900, rank 1 from 700: 200 µs of transfer, and on rank 0 300 of waiting."""
    each_step = {"b_0": [200, 300], "a_1": [200, 0]}
    assert waits(ours, "gloo") == {"3": each_step, "4": each_step, "all": each_step}
    assert note(ours, "gloo") is None


def test_waiting_within_an_operator_is_computation_in_stock_and_not_in_ours(stock, ours):
    """Of rank 0's 500 µs of communication the stock plugin finds 100 overlapped: all of the hook's.

    Computed are 300 + 90 µs until the exchange begins, 70 during it, and 50 by the optimizer; on rank 1 as many.
    """
    assert overlap(stock, "gloo")["b_0"] == [400, 100, 400, 100]
    assert overlap(ours, "gloo") == {"b_0": [440, 70, 430, 60], "a_1": [440, 70, 130, 360]}


def test_ranks_are_in_the_order_of_their_names_in_stock_and_of_their_numbers_in_ours(stock, ours):
    assert list(overlap(stock, "gloo")) == ["a_1", "b_0"]
    assert list(overlap(ours, "gloo")) == ["b_0", "a_1"]


def test_sizes_times_and_calls_are_those_of_the_operations(ours):
    assert operations(ours, "gloo", "b_0") == {"gloo:all_reduce": [2, 8000, 4000, 1000, 500, 400, 200]}
    assert operations(ours, "gloo", "a_1") == {"gloo:all_reduce": [2, 8000, 4000, 400, 200, 400, 200]}


def test_an_exchange_that_ends_after_its_step_is_of_step_null_in_stock_and_of_its_own_in_ours(stock, ours):
    assert waits(stock, "after-the-step")["null"] == {"rank_1": [599, 2]}
    assert list(waits(stock, "after-the-step")["4"]) == ["rank_0"]
    assert waits(ours, "after-the-step")["4"] == {"rank_0": [599, 0], "rank_1": [599, 2]}
    assert set(waits(ours, "after-the-step")) == {"3", "4", "all"}


def test_operators_that_wait_for_an_exchange_overlap_it_in_stock_and_not_in_ours(stock, ours):
    assert overlap(stock, "fsdp-by-hand")["rank_0"] == [620, 280, 0, 100]
    assert overlap(ours, "fsdp-by-hand") == {"rank_0": [600, 0, 280, 120], "rank_1": [600, 0, 180, 220]}
    assert waits(ours, "fsdp-by-hand")["3"] == {"rank_0": [180, 100], "rank_1": [180, 0]}


def test_double_has_no_size_in_stock_and_eight_bytes_in_ours(stock, ours):
    assert operations(stock, "double", "rank_0")["gloo:all_reduce"][1] == 0
    assert operations(ours, "double", "rank_0")["gloo:all_reduce"][1] == 80


def test_a_barrier_is_unknown_in_stock_and_counted_in_ours(stock, ours):
    assert "Distributed" not in stock.get("views", run="barrier")
    assert operations(ours, "barrier", "rank_0") == {"gloo:barrier": [1, 0, 0, 500, 500, 499, 499]}
    assert waits(ours, "barrier")["3"] == {"rank_0": [499, 1], "rank_1": [499, 0]}


# ------------------------------------------------------------------------------------------------- NCCL, known truth


def test_of_nccl_the_launch_is_timed_in_stock_and_the_kernel_in_ours(stock, ours):
    assert operations(stock, "nccl-2022", "rank_0")["nccl:all_reduce"][3] == 3 * 15
    for run in ("nccl", "nccl-2022"):
        assert operations(ours, run, "rank_0") == {"nccl:all_reduce": [3, None, None, 300, 100, 120, 40]}
        assert operations(ours, run, "rank_1") == {"nccl:all_reduce": [3, None, None, 120, 40, 120, 40]}
        assert waits(ours, run)["all"] == {"rank_0": [40, 60], "rank_1": [40, 0]}


def test_nccls_kernels_overlap_themselves_in_stock_and_not_in_ours(stock, ours):
    """Kernels other than NCCL's run for 480 µs of a step, 50 of them during rank 0's exchange, none during rank 1's."""
    assert overlap(stock, "nccl", "5")["rank_1"][1] >= 40
    for step in map(str, cuda_trace.NUMBERS):
        assert overlap(ours, "nccl", step) == {"rank_0": [430, 50, 50, 470], "rank_1": [480, 0, 40, 480]}


def test_fsdps_gathering_by_nccl_is_unknown_in_stock_and_counted_in_ours(stock, ours):
    assert "Distributed" not in stock.get("views", run="nccl-gather")
    assert operations(ours, "nccl-gather", "rank_0") == {"nccl:all_gather": [3, None, None, 300, 100, 120, 40]}


def test_a_job_with_both_libraries_has_no_view_in_stock_and_has_one_in_ours(stock, ours):
    assert "Distributed" not in stock.get("views", run="both")
    assert waits(ours, "both") == waits(ours, "nccl")


# --------------------------------------------------------------------------------- what cannot be compared, and why


def test_with_unequal_numbers_the_view_vanishes_in_stock_and_compares_the_other_steps_in_ours(stock, ours):
    assert "Distributed" not in stock.get("views", run="unequal")
    assert waits(ours, "unequal") == {side: {"rank_0": [200, 300], "rank_1": [200, 0]} for side in ("3", "all")}
    assert operations(ours, "unequal", "rank_1")["gloo:all_reduce"] == [3, 12000, 4000, 710, 237, 200, 200]
    assert "gloo:all_reduce in step 4 (rank_0 1, rank_1 2)" in note(ours, "unequal")
    assert "equally many batches" in note(ours, "unequal")


def test_other_steps_are_compared_in_stock_and_only_the_same_in_ours(stock, ours):
    assert waits(stock, "other-steps")["3"] == {"rank_0": [200, 100]}  # with rank 1's step 4
    assert waits(ours, "other-steps") == {side: {"rank_0": [200, 300], "rank_1": [200, 0]} for side in ("4", "all")}
    assert "(rank_0 3 and 4, rank_1 4 and 5); compared are 4" in note(ours, "other-steps")
    assert waits(ours, "no-step-shared") == {"all": {}}
    assert "compared are none" in note(ours, "no-step-shared")
    assert set(overlap(ours, "no-step-shared", "all")) == {"rank_0", "rank_1"}


def test_ranks_of_one_name_are_one_worker_in_stock_and_two_in_ours(stock, ours):
    assert stock.get("workers", run="same-names", view="Overview") == ["rank_0"]
    assert ours.get("workers", run="same-names", view="Overview") == ["rank_0_0", "rank_0_1"]
    assert waits(ours, "same-names")["3"] == {"rank_0_0": [200, 300], "rank_0_1": [200, 0]}


def test_a_rank_alone_waits_for_nobody_in_stock_and_is_said_to_be_alone_in_ours(stock, ours):
    assert waits(stock, "alone")["3"] == {"rank_0": [500, 0]}
    assert waits(ours, "alone") == {"all": {}}
    assert operations(ours, "alone", "rank_0") == {"gloo:all_reduce": [1, 4000, 4000, 500, 500, None, None]}
    assert note(ours, "alone").startswith("This is the trace of one of 2 ranks")
    assert "Record all ranks into one folder" in note(ours, "alone")


@pytest.mark.parametrize(
    ("run", "compares", "says"),
    [
        ("some", True, "the traces of 2 of 4 ranks"),
        ("one-rank-job", False, "The job has one rank, which waits for nobody."),
        ("two-jobs", False, "a_1 and b_1 say that they are the same rank, 0"),
        ("idle", False, "rank_1 recorded no exchange in any step"),
        ("no-kernels", False, "rank_0 and rank_1 called NCCL, and none of its kernels is recorded"),
        ("groups", False, "Gloo does not record between which ranks it exchanges"),
        ("send", True, "What goes from one rank to another is not compared: gloo:send."),
        ("nccl", True, "Sizes are unknown where they are left out. Record with record_shapes=True."),
    ],
)
def test_the_note_says_what_is_not_compared_and_why(ours, run, compares, says):
    assert says in note(ours, run)
    assert (len(waits(ours, run)["all"]) > 0) == compares


# ----------------------------------------------------------------------------------------------- recorded, and ours


def test_recorded_with_gloo_the_punctual_rank_waits_as_its_trace_shows(ours, logdir):
    """One exchange a step: by its duration on both ranks alone."""
    durations = {}
    for file in (logdir / "ddp").iterdir():
        events = json.loads(read(file))["traceEvents"]
        exchanges = sorted((each["ts"], each["dur"]) for each in events if each["name"] == "gloo:all_reduce")
        durations[file.name.split(".")[0]] = [duration for _, duration in exchanges]
    table = waits(ours, "ddp")
    assert list(table) == ["all", "2", "3", "4"]
    for place, step in enumerate("234"):
        shortest = min(each[place] for each in durations.values())
        for worker, each in durations.items():
            assert table[step][worker] == pytest.approx([shortest, each[place] - shortest], abs=0.01)
    assert table["all"]["rank_0"][1] > table["all"]["rank_1"][1]
    assert note(ours, "ddp") is None


def test_recorded_with_fsdp_less_is_overlapped_than_in_stock_and_gather_and_scatter_are_counted(stock, ours):
    for worker in ("rank_0", "rank_1"):
        assert overlap(ours, "fsdp", "all")[worker][1] < overlap(stock, "fsdp", "all")[worker][1]
        found = operations(ours, "fsdp", worker)
        assert {name: row[0] for name, row in found.items()} == {"gloo:all_gather": 12, "gloo:reduce_scatter": 6}
    assert "gloo:reduce_scatter" not in operations(stock, "fsdp", "rank_0")  # an all_reduce, as gloo itself calls it


@pytest.mark.parametrize("run", ["gloo", "nccl", "after-the-step", *RECORDED])
def test_the_steps_are_as_long_as_those_of_traces(ours, logdir, run):
    for worker, trace in zip(overlap(ours, run, "all"), traces.ranks(logdir / run).values(), strict=True):
        for step, (start, end) in traces.steps(trace)[["start", "end"]].iterrows():
            assert sum(overlap(ours, run, str(step))[worker]) == pytest.approx(end - start, abs=0.1)


@pytest.mark.parametrize("run", ["gloo", "nccl", "ddp", "fsdp"])
def test_calls_and_sizes_are_those_of_traces_communication(ours, logdir, run):
    """And with NCCL all times of exchange.

    With gloo `communication` counts from the issue of an operation, the view from when gloo takes it up. Waiting and
    transfer differ by their meaning: the view splits all communication, `communication` what is exposed of it.
    """
    table = traces.communication(logdir / run)
    steps = len(waits(ours, run)) - 1
    for worker, (_, of_rank) in zip(overlap(ours, run, "all"), table.iterrows(), strict=True):
        rows = operations(ours, run, worker).values()
        assert sum(row[0] for row in rows) / steps == of_rank["collectives"]
        if run != "nccl":  # without shapes
            assert sum(row[1] for row in rows) / steps / 1e6 == pytest.approx(of_rank["megabytes"])
        _, both, alone, _ = overlap(ours, run, "all")[worker]
        if run == "nccl":
            assert [both, alone] == pytest.approx([1e3 * of_rank["overlapped"], 1e3 * of_rank["exposed"]])
        else:
            assert both + alone <= 1e3 * (of_rank["overlapped"] + of_rank["exposed"]) + 0.1


def test_all_operations_of_a_step_are_split_without_rest(ours):
    """Transfer and synchronizing sum to the time of communication, where nothing ends after its step."""
    for run in ("gloo", "nccl", "fsdp-by-hand", "barrier"):
        for step, of_workers in waits(ours, run).items():
            for worker, parts in of_workers.items():
                assert sum(parts) == pytest.approx(sum(overlap(ours, run, step)[worker][1:3]))
