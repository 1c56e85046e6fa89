"""A clock on which only sleeping and working take time: by it durations are exact, however busy the machine is."""

import itertools
import sys
import time
from collections import deque

from support.loops import Calls
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter


class Clock:
    """Stands in for the module `time` of the modules and packages that it is given, in this process.

    Attributes
    ----------
    now, worked : float
        Seconds that have passed, and those of them that a processor worked.
    """

    def __init__(self, monkeypatch, *modules):
        self.now = self.worked = 0.0
        monkeypatch.setattr("stepscope.timing.stopwatch._uses_gpu", lambda: False)  # which has a clock of its own
        names = tuple(module.__name__ for module in modules)
        inside = tuple(f"{name}." for name in names)
        for name, module in list(sys.modules.items()):
            if (name in names or name.startswith(inside)) and getattr(module, "time", None) is time:
                monkeypatch.setattr(module, "time", self)

    def perf_counter(self):
        return self.now

    monotonic = perf_counter

    def process_time(self):
        return self.worked

    def sleep(self, seconds):
        self.now += seconds

    def work(self, seconds):
        self.now += seconds
        self.worked += seconds


class Busy(Calls):
    """Items that take a core for some time of a clock; `also` is called for each, such as to let others have it."""

    def __init__(self, clock, seconds, also=lambda: None):
        super().__init__(lambda index: (clock.work(seconds), also()))


class Simulated(DataLoader):
    """Loads in this process, and by its clock takes the time that it would with workers, each of which has a core.

    `starting` and `ending` are the times that it takes to start them, and to end them.
    """

    def __init__(self, clock, *arguments, starting=0.0, ending=0.0, **settings):
        super().__init__(*arguments, **settings)
        self.clock, self.starting, self.ending = clock, starting, ending

    def _get_iterator(self):
        return _Workers(self) if self.num_workers else super()._get_iterator()


class _Workers(_SingleProcessDataLoaderIter):
    def __init__(self, loader):
        super().__init__(DataLoader(loader.dataset, loader.batch_size))
        self.loader, self.clock = loader, loader.clock
        self.ready = [self.clock.now + loader.starting] * loader.num_workers
        self._ask()

    def _ask(self):
        self.asked = deque([self.clock.now] * self.loader.num_workers * self.loader.prefetch_factor)

    def _reset(self, loader, first_iter=False):
        super()._reset(loader, first_iter)
        self._ask()

    def _next_data(self):
        now, worker = self.clock.now, self._num_yielded % len(self.ready)
        try:
            batch = super()._next_data()
        except StopIteration:
            self.clock.sleep(self.loader.ending)
            raise
        self.ready[worker] = max(self.ready[worker], self.asked.popleft()) + self.clock.now - now
        self.clock.now = max(now, self.ready[worker])
        self.asked.append(self.clock.now)
        return batch


def once(clock, seconds, at):
    """Return a function whose call with this number, from 0, takes some seconds."""
    calls = itertools.count()
    return lambda *_: clock.sleep(seconds if next(calls) == at else 0)
