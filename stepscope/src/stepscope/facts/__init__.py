"""Measurements of a training loop, and nothing else: frozen dataclasses with units in their names.

`observe` makes facts, rules read them. They are written as ``facts.json`` beside each recorded trace, so that the same
diagnosis can be made again anywhere (`saving`). An attribute that may be unknown is None, and only there. No fact holds
values of tensors, environment variables, or absolute paths: a file of facts is safe to send.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stepscope.facts.device import Device
from stepscope.facts.hazards import Compilation
from stepscope.facts.host import Host
from stepscope.facts.loader import Loader
from stepscope.facts.loop import Loop, Machine
from stepscope.facts.profile import Profile
from stepscope.facts.trials import Trials


@dataclass(frozen=True)
class Facts:
    """One process that trains: all that the rules need. Of a trace alone only `profile`, `host` and `device` are known.

    `problem` says why there is no profile, which every diagnosis needs.
    """

    profile: Profile | None = None
    host: Host | None = None
    device: Device | None = None  # None if no accelerator ran kernels
    loop: Loop | None = None
    loader: Loader | None = None
    machine: Machine | None = None
    trials: Trials = field(default_factory=Trials)
    compilation: Compilation = field(default_factory=Compilation)
    problem: str = ""
