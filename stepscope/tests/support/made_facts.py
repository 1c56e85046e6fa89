"""Facts made by hand: of a loop, of a trace with a GPU, and of a job. As they stand no rule finds anything in them."""

from dataclasses import fields, replace

from stepscope.facts import Facts
from stepscope.facts.device import Accelerator, Device
from stepscope.facts.host import Host
from stepscope.facts.job import Exchanges, Job, Rank
from stepscope.facts.loader import PARTS, REST, Items, Loader, Settings
from stepscope.facts.loop import Loop, Machine, Pauses, Step
from stepscope.facts.profile import Profile
from stepscope.facts.trials import Trials

NO_PARTS = dict.fromkeys([*PARTS, REST], 0.0)
ITEMS = Items(100, 1.0, 1.0, 32, NO_PARTS, opened=1.0, file_bytes=50e3, slowest="decode")
IDLE = dict.fromkeys(["Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other"], 0.0)
ON_CPU = Profile(8, 40.0, IDLE | {"CPU Exec": 0.95, "Other": 0.05})
ON_GPU = Profile(8, 40.0, IDLE | {"Kernel": 0.97, "CPU Exec": 0.03}, devices=1)
DEVICE = Device(
    accelerators=(Accelerator(0, "Made-up GPU", 0.97, 0.9, 0.8),),
    waiting=0.0, blocked=0.0, synchronizing=0.0, synchronized=8, operator="aten::item",
    copying=0.0, pageable=0.0, within=0.0,
    gaps=10.0, gap_us=20.0, short_us=0.0, long_us=0.0, all_us=1000.0, doing="Python",
    kernels=0.97, launches=100.0, kernel_us=388.0, fill=0.9, float32=0.0, layouts=0.0, capability=(8, 0),
)  # fmt: skip
STEPS, LONG = 20, 9  # in a loop, and how many of them wait longer than usual


def of_loop(
    step: float = 40.0,
    wait: float = 0.0,
    workers: int = 2,
    *,
    usual: float | None = None,
    restart: float = 0.0,
    apart: float = 0.0,
    cpu: float = 0.0,
    cores: int = 8,
    held: float = 0.0,
    profile: Profile = ON_CPU,
    host: Host | None = None,
    trials: Trials | None = None,
    loaded: bool = True,
    **changes,
) -> Facts:
    """Return the facts of a loop on the CPU; times are ms of a step.

    Some steps wait longer than `usual`, so that the mean wait is `wait`; `restart` and `apart` are for starting workers
    and for work between epochs, `cpu` is the CPU time of a step. Other processes `held` the cores for a share of the
    time. It is known how items are `loaded`, or not. `changes` are of `Loop` or of `Items`.
    """
    of_items = {field.name: changes.pop(field.name) for field in fields(Items) if field.name in changes}
    items = replace(ITEMS, **of_items) if loaded else None
    usual = wait if usual is None else usual
    long = (STEPS * wait - (STEPS - LONG) * usual) / LONG
    waits = [usual] * (STEPS - LONG) + [long] * LONG
    of_the_loop = {
        "start_ms": ITEMS.batch_ms if items is None else items.batch_ms + 2 * restart,
        "epoch_steps": 2,
        "cpu_ms": cpu,
        "pauses": Pauses(int(apart > 0), 2 * apart, apart),
    }
    return Facts(
        profile,
        host or Host(),
        loop=Loop(
            tuple(Step(each, step - wait + each) for each in waits),
            STEPS * step,
            workers=workers,
            **of_the_loop | changes,
        ),
        loader=Loader("DataLoader", Settings("Photos", 32, workers, 2, False, False), items),
        machine=Machine("CPU", "", cores, "2.15", "3.12", held_share=held),
        trials=trials or Trials(),
    )


def of_trace(profile: Profile = ON_CPU, **changes) -> Facts:
    """Return the facts of a trace without an accelerator; `changes` are of `Profile`, and of its shares."""
    return Facts(_changed(profile, changes))


def of_gpu(profile: dict | None = None, **changes) -> Facts:
    """Return the facts of a trace of a GPU; `profile` changes `Profile` and its shares, `changes` are of `Device`."""
    return Facts(_changed(ON_GPU, profile or {}), Host(), replace(DEVICE, **changes))


def _changed(profile: Profile, changes: dict) -> Profile:
    shares = {name: changes[name] for name in IDLE if name in changes}
    others = {name: value for name, value in changes.items() if name not in IDLE}
    return replace(profile, shares=profile.shares | shares, **others)


def of_job(*, transfer: float = 1.0, overlapped: float = 20.0, waiting: float = 0.0, **changes) -> Job:
    """Return the facts of two ranks with steps of 100 ms; ms of a step, `transfer` of exposed communication."""
    exposed = transfer + waiting
    ranks = tuple(
        Rank(f"rank {number}", exposed, waiting, overlapped, transfer, 10.0, 100.0, 1 - exposed / 100)
        for number in range(2)
    )
    gradients = Exchanges(10.0, overlapped + transfer, ("all_reduce",), 100e6, 10e6, 10e6)
    return Job(
        ranks, **{"steps": 4, "step_ms": 100.0, "recorded": True, "all": gradients, "gradients": gradients} | changes
    )
