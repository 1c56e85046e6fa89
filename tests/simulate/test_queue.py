import pytest

from helpers import simulate

PARTS = [(2, 0), (3, 3), (2, 5), (1, 1)]  # host 8 ms a step, accelerator 9


def test_a_host_that_never_asks_runs_ahead_of_a_slower_accelerator():
    found = simulate.SimulatedQueue(PARTS).run(3)
    assert list(found["host"]) == [8, 16, 24]
    assert list(found["device"]) == [14, 23, 32]  # idle until the first launch, and never again


def test_who_asks_waits_until_the_accelerator_is_done_and_then_lets_it_wait():
    found = simulate.SimulatedQueue(PARTS).run(3, asks=True)
    assert list(found["host"]) == list(found["device"]) == [14, 28, 42]


def test_an_accelerator_that_is_faster_than_its_host_waits_for_each_launch():
    found = simulate.SimulatedQueue([(4, 0), (4, 1)]).run(2)
    assert list(found["host"]) == [8, 16]
    assert list(found["device"]) == [9, 17]


@pytest.mark.parametrize("times", [1 / 8, 8])
def test_asking_costs_most_where_host_and_accelerator_take_alike(times):
    def cost(parts):
        never, asks = (simulate.SimulatedQueue(parts).run(50, each)["device"].iloc[-1] for each in (False, True))
        return asks / never

    assert cost(PARTS) > 1.5
    assert cost([(launching, times * working) for launching, working in PARTS]) < 1.1
