import pytest
import torch

from helpers import timing


class Late:
    """Images that take some time of a clock to copy."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def to(self, device, non_blocking):
        self.clock.sleep(self.seconds)
        return torch.zeros(4, 3, 2, 2)


def test_a_step_is_split_into_its_phases(clock):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.register_forward_hook(lambda *_: clock.sleep(0.005))
    model[1].weight.register_hook(lambda gradient: clock.sleep(0.007))
    optimizer.register_step_post_hook(lambda *_: clock.sleep(0.002))

    def batches():
        for number in range(9):
            clock.sleep(3 if number < 2 else 0.020)  # the first two are the warm-up
            yield Late(clock, 0.003), torch.zeros(4, dtype=torch.long)

    phases = timing.phases(batches(), model, optimizer, steps=5)
    assert phases == pytest.approx({"loading": 20, "copy": 3, "forward": 5, "backward": 7, "optimizer": 2})


def test_each_stage_is_called_with_what_the_one_before_returned():
    seen = []
    timing.stages({"double": lambda item: 2 * item, "add": lambda item: item + 1, "look": seen.append}, iter([1, 2]))
    assert seen == [3, 5] * 2  # two passes


def test_stages_are_timed_in_the_second_pass(clock):
    read = set()

    def slow_at_first(item):
        clock.sleep(0.002 if item in read else 60)
        read.add(item)

    spent = timing.stages({"read": slow_at_first, "sleep": lambda item: clock.sleep(0.003), "look": repr}, [1, 2])
    assert list(spent) == ["read", "sleep", "look"]
    assert spent == pytest.approx({"read": 2_000, "sleep": 3_000, "look": 0})  # µs an item
