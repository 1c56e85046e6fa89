"""A clock on which only sleeping and working take time: by it durations are exact, however busy the machine is."""

import itertools
import sys
import time

from support.loops import Calls


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


def once(clock, seconds, at):
    """Return a function whose call with this number, from 0, takes some seconds."""
    calls = itertools.count()
    return lambda *_: clock.sleep(seconds if next(calls) == at else 0)
