"""Settings that a step was tried with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepscope import thresholds
from stepscope.facts.trials import Trial, Trials
from stepscope.rules.rule import Rule


@dataclass(frozen=True)
class Tried:
    """A view of the trials; `work` is the share of a step in which it does not wait for its batch."""

    trials: Trials
    work: float = 1.0


def _gain(of: Callable[[Trials], Trial]) -> Callable[[Tried], float]:
    return lambda tried: tried.work * of(tried.trials).gain


def _threads(key: str, name: str, means: str, too_many: bool) -> Rule[Tried]:
    """Return the row for too few or too many threads."""

    def gain(tried: Tried) -> float | None:
        applies = (tried.trials.threads > tried.trials.other_threads) is too_many
        return tried.work * tried.trials.other.gain if applies else None

    return Rule(
        key, name, "settings", "number of threads", means, gain,
        "A step took {trials.other.before_ms:ms} with PyTorch's {trials.threads:thread}, and "
        "{trials.other.after_ms:ms} with {trials.other_threads}.",
        "torch.set_num_threads({trials.other_threads})  # OMP_NUM_THREADS in the environment may set it, too",
    )  # fmt: skip


RULES: tuple[Rule[Tried], ...] = (
    _threads("settings.few-threads", "too few threads", "A step is faster with a thread for each free core.", False),
    _threads("settings.many-threads", "too many threads", "A step is faster with no more threads than cores.", True),
    Rule(
        "settings.anomaly-detection", "anomaly detection", "settings", "debugging settings",
        "Autograd checks each operator for NaN.",
        _gain(lambda trials: trials.anomaly),
        "Autograd checks each operator for NaN: a step took {trials.anomaly.before_ms:ms}, without checks "
        "{trials.anomaly.after_ms:ms}.",
        "torch.autograd.set_detect_anomaly(False)  # only to look for a NaN",
    ),
    Rule(
        "settings.deterministic", "deterministic algorithms", "settings", "debugging settings",
        "Deterministic algorithms are slower here than the default ones.",
        _gain(lambda trials: trials.deterministic),
        "A step took {trials.deterministic.before_ms:ms}, with the default algorithms "
        "{trials.deterministic.after_ms:ms}.",
        "torch.use_deterministic_algorithms(False)  # seeds alone reproduce a run about as well",
    ),
    Rule(
        "settings.float64", "numbers of 64 bits", "settings", "mixed precision",
        "The weights have 64 bits.",
        _gain(lambda trials: trials.single),
        "The weights are float64: a forward and a backward pass took {trials.single.before_ms:ms}, with float32 "
        "{trials.single.after_ms:ms}.",
        "model.float()  # and the batches: NumPy computes in float64",
    ),
    Rule(
        "settings.small-batch", "a small batch", "settings", "larger batches",
        "An item costs less in a larger batch.",
        _gain(lambda trials: trials.larger),
        f"A step of {{trials.batch}} took {{trials.larger.before_ms:ms}}; in one {thresholds.LARGER_BATCH} times as "
        "large, as many took {trials.larger.after_ms:ms}.",
        "DataLoader(…, batch_size=…)  # larger, with a learning rate for it; or accumulate fewer",
    ),
)  # fmt: skip
