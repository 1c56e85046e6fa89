"""Tests of traces of several ranks: on simulated jobs, whose truth is known, and on real ones of gloo."""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import rank_traces
from support.written import event, step, write

from stepscope import traces
from stepscope.__main__ import main
from stepscope.traces import alignment

HOUR = 3.6e9  # µs
EQUAL = [[[100, 200], [150, 150], [120, 180], [130, 170]]] * 2  # four steps of two ranks
UNEVEN = [[[3000, 2000], [2500, 2500], [1000, 4000], [1700, 2900]]] * 2
COLUMNS = ["step", "overlapped", "exposed", "waiting"]


def late_by(us, world=2, rank=1, steps=4):
    """Return what each rank computes, one of them later than the others."""
    return [[[300 + us * (each == rank), 200 + number] for number in range(steps)] for each in range(world)]


durations = st.integers(1, 300)
moments = st.integers(-(10**11), 10**11)


@st.composite
def schedules(draw):
    world, steps, buckets = (draw(st.integers(1, most)) for most in (4, 3, 3))
    of_step = st.lists(durations, min_size=buckets, max_size=buckets)
    of_rank = st.lists(of_step, min_size=steps, max_size=steps)
    computing = draw(st.lists(of_rank, min_size=world, max_size=world))
    begins, shifts = (draw(st.lists(each, min_size=world, max_size=world)) for each in (durations, moments))
    return computing, draw(durations), begins, shifts, draw(st.sampled_from(["gloo", "nccl"]))


@pytest.mark.processes
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(schedules())
def test_shares_sum_to_the_step_and_no_clock_changes_them(tmp_path_factory, schedule):
    computing, transfer, begins, shifts, backend = schedule
    job = rank_traces.job(computing, transfer, begins)
    folder = rank_traces.write(tmp_path_factory.mktemp("job"), job, backend=backend, clocks=shifts)
    table = traces.communication(folder)
    np.testing.assert_allclose(table[["compute", "overlapped", "exposed"]].sum(axis=1), table["step"])
    np.testing.assert_allclose(table["waiting"] + table["transfer"], table["exposed"], atol=1e-9)
    expected = [[row[name] for name in COLUMNS] for row in rank_traces.truth(job, backend)]
    np.testing.assert_allclose(table[COLUMNS], expected, atol=1e-3)
    np.testing.assert_allclose(table["efficiency"], 1 - table["exposed"] / table["step"])
    assert (table["collectives"] == len(computing[0][0])).all() and (table["megabytes"] == len(computing[0][0])).all()
    assert list(table.index) == [f"rank {number}" for number in range(len(job))]


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_each_kind_of_operation_has_its_own_exposed_time(tmp_path, operation):
    """The last bucket's 6 ms follow the backward pass; the other 9 travel during it. Nothing hides a broadcast."""
    folder = rank_traces.ddp(tmp_path, buckets=10, milliseconds=6, broadcast=2, operation=operation)
    table = traces.communication_by_kind(folder)
    assert table.index.to_list() == [(operation, "0 [0, 1]"), ("broadcast", "0 [0, 1]")]
    np.testing.assert_allclose(table[["operations", "time", "exposed"]], [[10, 60, 6], [1, 2, 2]])
    assert table["exposed"].sum() == pytest.approx(traces.communication(folder)["exposed"].mean())


def test_ranks_on_one_machine_have_one_clock_if_their_collectives_allow_it(tmp_path):
    job = rank_traces.job(EQUAL, transfer=70)
    one = traces.ranks(rank_traces.write(tmp_path / "one", job, one_host=True, clocks=[0, 30]))
    assert one.clock == {"rank 0": 0, "rank 1": 30}
    other = traces.ranks(rank_traces.write(tmp_path / "other", job, one_host=True, clocks=[0, HOUR]))
    assert other.clock["rank 1"] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("world", "backend"), [(2, "gloo"), (8, "nccl")])
def test_the_rank_that_the_other_ranks_wait_for_is_named(tmp_path, world, backend):
    job = rank_traces.job(late_by(400, world=world), transfer=70)
    clocks = [rank * HOUR for rank in range(world)]
    table = traces.communication(rank_traces.write(tmp_path, job, backend=backend, clocks=clocks))
    assert table.attrs["straggler"] == "rank 1"
    assert table.attrs["late_ms"] == pytest.approx(0.4, rel=1e-3)
    # Each of the others has asked when the late one has 400 µs to go.
    waiting = [rank["waiting"] for number, rank in enumerate(rank_traces.truth(job, backend)) if number != 1]
    assert table["waiting"].drop("rank 1").mean() == pytest.approx(np.mean(waiting), rel=1e-3)
    assert table["waiting"]["rank 1"] < 0.01


def test_no_rank_is_named_by_chance(tmp_path):
    table = traces.communication(rank_traces.write(tmp_path / "equal", rank_traces.job(EQUAL, transfer=70)))
    assert table.attrs == {"straggler": None, "late_ms": 0.0, "unequal": []}
    random = np.random.default_rng(0)
    named = 0
    for number in range(10):
        computing = random.integers(100, 500, size=(3, 8, 2)).tolist()
        table = traces.communication(rank_traces.write(tmp_path / str(number), rank_traces.job(computing, transfer=70)))
        assert table["waiting"].max() > 0.02
        named += table.attrs["straggler"] is not None
    assert named <= 1


def test_operations_do_not_match_in_a_step_in_which_a_rank_lacks_one(tmp_path):
    job = rank_traces.job(UNEVEN, transfer=900)
    lacking = {1: [0, 5]}  # of the steps 3 and 5
    job = traces.ranks(rank_traces.write(tmp_path, job, leave_out=lacking, clocks=[0, HOUR]))
    assert job.clock["rank 1"] == pytest.approx(0, abs=0.01)
    table = traces.collectives(job)
    ranks = table.groupby("number").agg({"rank": set, "step": "first"})
    assert (ranks.loc[ranks["step"].isin([3, 5]), "rank"].map(len) == 1).all()
    assert (ranks.loc[ranks["step"].isin([4, 6]), "rank"] == {"rank 0", "rank 1"}).all()


def test_operations_whose_number_differs_between_ranks_are_named(tmp_path):
    job = rank_traces.job([EQUAL[0]] * 3, transfer=70)
    table = traces.communication(rank_traces.write(tmp_path, job, leave_out={1: [2, 4]}))
    (sentence,) = table.attrs["unequal"]
    assert "all_reduce of 1 MB, step 4: rank 1 has 1" in sentence and "1 more step" in sentence
    assert table["collectives"].tolist() == [2, 1.5, 2]


def test_spans_of_a_rank_are_combined(tmp_path):
    job = rank_traces.job(late_by(400), transfer=70)
    one = traces.communication(rank_traces.write(tmp_path / "one", job))
    two = traces.communication(rank_traces.write(tmp_path / "two", job, spans=2, clocks=[0, HOUR]))
    np.testing.assert_allclose(two, one, atol=1e-3)
    assert two.attrs["straggler"] == "rank 1"


def test_ranks_without_data_exchange_keep_the_clocks_of_their_machines(tmp_path):
    for rank, begin in enumerate((1000, 1300)):
        write(tmp_path / f"{rank}.1.pt.trace.json", [step(1, begin, begin + 100)])
    ranks = traces.ranks(tmp_path)
    assert list(ranks.clock.values()) == [0, 300]
    assert traces.collectives(ranks).empty
    table = traces.communication(dict(ranks))
    assert (table["compute"] == table["step"]).all() and (table["efficiency"] == 1).all()


def test_a_trace_without_steps_has_operations_but_no_means_of_steps(tmp_path):
    path = rank_traces.write(tmp_path, rank_traces.job(EQUAL, transfer=70), marked=False)
    assert len(traces.collectives(path)) == 16
    with pytest.raises(traces.NoSteps):
        traces.communication(path)


def test_python_between_operators_does_not_count_as_waiting(tmp_path):
    """A loop that does something else in Python, while an operation is under way that ends much later."""
    events = [
        step(1, 0, 1000),
        event("cpu_op", "aten::mm", 0, 100),
        event("cpu_op", "c10d::allreduce_", 100, 101),
        event("user_annotation", "gloo:all_reduce", 110, 800, thread=2),
        event("cpu_op", "aten::mm", 300, 500),  # 100 to 300: Python
        event("cpu_op", "aten::mm", 790, 900),  # 500 to 790: waits; the end is noted 10 µs later
    ]
    table = traces.communication(traces.ranks(write(tmp_path / "trace.json", events)))
    assert table["exposed"].item() == 0.29 and table["overlapped"].item() == 0.41


def test_time_in_which_another_operation_transfers_does_not_count_as_waiting(tmp_path):
    for rank, second in enumerate((110, 400)):  # when each begins its second operation
        events = [
            step(1, 0, 1000),
            event("cpu_op", "aten::mm", 0, 100),
            event("cpu_op", "c10d::allreduce_", 100, 100),
            event("user_annotation", "gloo:all_reduce", 105, 300, thread=2),
            event("cpu_op", "c10d::allreduce_", 101, 101),
            event("user_annotation", "gloo:all_reduce", second, 600, thread=3),
            event("cpu_op", "aten::mm", 600, 900),
        ]
        write(tmp_path / f"{rank}.1.pt.trace.json", events)
    table = traces.communication(tmp_path)
    assert table["exposed"].tolist() == [0.5, 0.5]
    assert table["waiting"].tolist() == [pytest.approx(0.1), 0]  # 300 to 400


def test_an_operator_that_waits_for_its_own_exchange_does_not_compute(tmp_path):
    """As in SyncBatchNorm, or in what FSDP does between operators of the backward pass."""
    events = [
        step(1, 0, 1000),
        event("cpu_op", "SyncBatchNorm", 100, 700),
        event("cpu_op", "aten::mean", 110, 200),
        event("cpu_op", "c10d::allreduce_", 200, 650),
        event("user_annotation", "gloo:all_reduce", 210, 640, thread=2),
        event("cpu_op", "aten::sub", 650, 690),
    ]
    table = traces.communication(traces.ranks(write(tmp_path / "trace.json", events)))
    assert table["exposed"].item() == pytest.approx(0.44)


def test_operations_are_recognized_by_the_names_of_c10d_nccl_and_gloo():
    names = {
        "c10d::_allgather_base_": "all_gather",
        "nccl:_reduce_scatter_base": "reduce_scatter",
        "nccl:all_reduce_barrier": "barrier",
        "nccl:recv 0<-1": "recv",
        "gloo:sparse_all_reduce": "all_reduce",
        "_broadcast_oop": "broadcast",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)": "send_recv",
        "coalesced": "coalesced",
    }
    assert {name: alignment.operation(name) for name in names} == names


def test_the_shell_prints_the_cost_of_communication_of_each_rank(tmp_path, capsys):
    path = rank_traces.write(tmp_path, rank_traces.job(late_by(400), transfer=70), leave_out={0: [7]})
    assert main(["traces", str(path)]) == 0
    output = re.sub(" +", " ", capsys.readouterr().out)
    assert f"{tmp_path.name}, 2 ranks together\n" in output
    assert re.search(r"^ rank 0 \d.* µs \d+ µs \d+ µs \d+ µs \d+ µs \d+% 1\.75 1\.75$", output, re.M)
    assert re.search(r"0\.\d+ ms more exposed communication in a step than rank 1, which is late", output)
    assert "step 6: rank 0 has 1" in output


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return rank_traces.record(tmp_path_factory.mktemp("recorded"))


@pytest.mark.slow
def test_a_recorded_rank_that_is_late_is_named(recorded):
    table = traces.communication(recorded)
    assert table.attrs["straggler"] == "rank 1" and table.attrs["unequal"] == []
    assert table.attrs["late_ms"] > 100  # of the 300
    assert table["waiting"]["rank 0"] > 100 > 0 <= table["waiting"]["rank 1"]


@pytest.mark.slow
def test_recorded_operations_are_those_that_were_called(recorded):
    table = traces.collectives(recorded)
    called = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce", "all_to_all", "gather", "scatter"}
    assert set(table["operation"]) - {"send", "recv"} == called | {"barrier"}
    gradients = table[(table["operation"] == "all_reduce") & (table["rank"] == "rank 0")]
    parameters = 2 * (300 * 300 + 300) + 2 * 300
    assert gradients.groupby("step")["bytes"].sum().tolist() == [parameters * 4] * 4
    assert (table["issued"] <= table["start"]).all()
    symmetric = table[table["operation"].isin({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})]
    both = symmetric.groupby("number")
    assert (both["rank"].nunique() == 2).all() and (both["operation"].nunique() == 1).all()


@pytest.mark.slow
def test_recorded_collectives_agree_with_the_clock_of_their_machine(recorded):
    ranks = traces.ranks(recorded)
    spans = [trace.spans[0] for trace in ranks.values()]
    if spans[0].host is not None:  # PyTorch 2.11 does not write it
        assert list(ranks.clock.values()) == [span.origin - spans[0].origin for span in spans]
    table = traces.collectives(ranks)
    symmetric = table[table["operation"].isin({"all_reduce", "barrier"})].groupby("number")
    assert (symmetric["start"].max() <= symmetric["end"].min()).all()  # nobody ends before the last has begun
