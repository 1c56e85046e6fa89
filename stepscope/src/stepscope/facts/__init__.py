"""Measurements of a training loop: frozen dataclasses with units in the names of their attributes.

`observe` measures facts, and `rules` read them. `saving` writes facts as ``facts.json`` beside each recorded trace, so
that any machine can repeat the diagnosis. None means unknown. Facts contain no values of tensors, no environment
variables and no absolute paths: a file of facts is safe to send.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stepscope.facts.batches import Batch
from stepscope.facts.device import Device
from stepscope.facts.hazards import Compilation
from stepscope.facts.host import Gradients, Host, Optimizer
from stepscope.facts.loader import Loader
from stepscope.facts.loop import Loop, Machine
from stepscope.facts.profile import Profile
from stepscope.facts.trials import Modes, Trials


@dataclass(frozen=True)
class Facts:
    """The facts of one training process. A trace alone gives only `profile`, `host` and `device`.

    Every diagnosis needs `profile`; if it is None, `problem` says why.
    """

    profile: Profile | None = None
    host: Host | None = None
    device: Device | None = None  # None if no accelerator ran kernels
    loop: Loop | None = None
    loader: Loader | None = None
    machine: Machine | None = None
    trials: Trials = field(default_factory=Trials)
    compilation: Compilation = field(default_factory=Compilation)
    optimizer: Optimizer = field(default_factory=Optimizer)
    batch: Batch = field(default_factory=Batch)  # one of the timed steps
    gradients: Gradients = field(default_factory=Gradients)
    modes: Modes = field(default_factory=Modes)
    problem: str = ""
