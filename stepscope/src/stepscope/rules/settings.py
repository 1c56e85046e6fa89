"""Settings that slow the step: by trials, or, in a script that must not change, by an estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepscope import thresholds
from stepscope.base.wording import distinct_milliseconds, percent
from stepscope.facts.host import Host, Optimizer
from stepscope.facts.trials import Modes, Trial, Trials
from stepscope.rules.rule import Gain, Rule, filled


@dataclass(frozen=True)
class Tried:
    """A view of the trials, and of settings that were not tried; `work` is the share of a step without its wait."""

    trials: Trials
    modes: Modes
    host: Host
    optimizer: Optimizer
    work: float
    kernels: float | None  # share of a GPU's kernels in a step; None without a GPU

    @property
    def computing(self) -> float:
        """The share of the passes and of the update in a step."""
        return self.work * sum(self.host.phases.values()) if self.kernels is None else self.kernels


def _compared(of: Callable[[Trials], Trial], text: str) -> Callable[[Tried], str]:
    """Return the evidence of a trial; the text contains ``{before}`` and ``{after}``."""

    def evidence(tried: Tried) -> str:
        before, after = distinct_milliseconds(of(tried.trials).before_ms, of(tried.trials).after_ms)
        return filled(text.replace("{before}", before).replace("{after}", after), tried)

    return evidence


def _gain(of: Callable[[Trials], Trial]) -> Callable[[Tried], float]:
    return lambda tried: tried.work * of(tried.trials).gain


def _of_anomaly_detection(view: Tried) -> float | None:
    """Return the gain of a trial; without a trial, the share of anomaly detection in the sampled steps."""
    if view.trials.anomaly.before_ms or not view.modes.anomaly:
        return _gain(lambda trials: trials.anomaly)(view)
    return view.work * view.host.debugging


def _of_single_precision(view: Tried) -> float | Gain:
    """Return the gain of a trial; without a trial, an estimate: float32 needs half of the bytes and instructions."""
    if view.trials.single.before_ms or view.optimizer.dtype != "float64":
        return _gain(lambda trials: trials.single)(view)
    of_device = thresholds.SINGLE_PRECISION if view.kernels is None else thresholds.SINGLE_PRECISION_OF_A_GPU
    return Gain(*(part * view.computing for part in of_device))


def _threads(key: str, name: str, means: str, too_many: bool) -> Rule[Tried]:
    """Return the row for too few or too many threads."""

    def gain(tried: Tried) -> float | None:
        applies = (tried.trials.threads > tried.trials.other_threads) is too_many
        return tried.work * tried.trials.other.gain if applies else None

    return Rule(
        key, name, "settings", "number of threads", means, gain,
        _compared(
            lambda trials: trials.other,
            "A step took {before} with PyTorch's {trials.threads:thread}, and "
            "{after} with {trials.other_threads:thread}.",
        ),
        "torch.set_num_threads({trials.other_threads})  # or the environment variable OMP_NUM_THREADS",
    )  # fmt: skip


RULES: tuple[Rule[Tried], ...] = (
    _threads("settings.few-threads", "too few threads", "A step is faster with a thread for each free core.", False),
    _threads("settings.many-threads", "too many threads", "A step is faster with no more threads than cores.", True),
    Rule(
        "settings.anomaly-detection", "anomaly detection", "settings", "debugging settings",
        "Autograd checks each operator for NaN.",
        _of_anomaly_detection,
        lambda view: _compared(
            lambda trials: trials.anomaly,
            "Autograd checks each operator for NaN: a step took {before} with the checks, and "
            "{after} without them.",
        )(view) if view.trials.anomaly.before_ms else (
            "Autograd notes the place of each operator, and checks each gradient for NaN, for "
            f"{percent(view.host.debugging)} of the sampled steps."
        ),
        "torch.autograd.set_detect_anomaly(False)  # only to look for a NaN",
    ),
    Rule(
        "settings.deterministic", "deterministic algorithms", "settings", "debugging settings",
        "Deterministic algorithms are slower here than the default ones.",
        _gain(lambda trials: trials.deterministic),
        _compared(
            lambda trials: trials.deterministic,
            "A step took {before} with deterministic algorithms, and "
            "{after} with the default algorithms.",
        ),
        "torch.use_deterministic_algorithms(False)  # with fixed seeds, runs still differ little",
    ),
    Rule(
        "settings.float64", "float64 weights", "settings", "mixed precision",
        "The weights are float64.",
        _of_single_precision,
        lambda view: _compared(
            lambda trials: trials.single,
            "The weights are float64: a forward and a backward pass took {before}, and "
            "{after} with float32.",
        )(view) if view.trials.single.before_ms else (
            f"The weights are float64. The passes and the update take {percent(view.computing)} of a step, and float32 "
            "needs half of the bytes, and half of the instructions or fewer."
        ),
        "model.float()  # convert the batches, too: NumPy's default is float64",
    ),
    Rule(
        "settings.small-batch", "a small batch", "settings", "larger batches",
        "An item takes less time in a larger batch.",
        _gain(lambda trials: trials.larger),
        _compared(
            lambda trials: trials.larger,
            "A step with a batch of {trials.batch:item} took {before}. In a batch "
            f"{thresholds.LARGER_BATCH} times as large, as many items took {{after}}.",
        ),
        "DataLoader(…, batch_size=…)  # larger, with an adapted learning rate; or accumulate fewer gradients",
    ),
)  # fmt: skip
