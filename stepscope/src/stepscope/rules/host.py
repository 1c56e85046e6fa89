"""The host's overhead in a step: short operators that are called very often, and work outside of operators."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stepscope import thresholds
from stepscope.base.wording import counted, percent, printable
from stepscope.facts.host import Calls, Framework, Host, Optimizer, Work
from stepscope.facts.profile import Profile
from stepscope.rules.rule import Gain, Rule, mostly


@dataclass(frozen=True)
class HostWork:
    """A view of the host's work. Shares refer to a step of the loop without the profiler."""

    host: Host
    optimizer: float
    calls: Gain
    elementwise: float
    updates: float
    outside: Gain
    constant: Gain  # perhaps nothing: the inputs may change
    around: Gain
    framework: Gain  # the framework's own work
    used: Optimizer

    @property
    def parts(self) -> float:
        """The share of the framework's parts that settings change."""
        known = sum(part.share for part in self.host.framework.parts)
        return known * self.framework.about / (self.host.framework.work.share or 1.0)

    @property
    def settings(self) -> str:
        """The settings by which the parts of the framework work less."""
        known = SETTINGS.get(self.host.framework.name.removeprefix("pytorch_"), {})
        kinds = dict.fromkeys(part.kind for part in self.host.framework.parts if part.share >= thresholds.WORTH)
        kinds = kinds or dict.fromkeys(part.kind for part in self.host.framework.parts[:1])
        return "\n".join(known.get(kind, "# work in every n-th step only, or leave this part out") for kind in kinds)

    @property
    def faster(self) -> str:
        """The optimizer's version that updates all weights at once, or the reason why it does not."""
        if self.used.split:
            return (
                f"# {self.used.groups} parameter groups for {self.used.tensors} weight tensors: merge the groups with "
                "equal options, since each group is updated by itself"
            )
        return at_once(self.used) or (
            f"# {self.used.name} updates one weight tensor after another: prefer an optimizer with fused=True"
        )

    @property
    def fewer_updates(self) -> str:
        """The change if updates take most of the step."""
        return f"{at_once(self.used)}\n# larger batches, or SparseAdam for a large nn.Embedding(sparse=True)".lstrip()


SETTINGS = {  # by package and kind of part
    "lightning": {
        "progress": "Trainer(…, enable_progress_bar=False)  # or callbacks=[TQDMProgressBar(refresh_rate=50)]",
        "logging": "Trainer(…, log_every_n_steps=50)",
        "saving": "ModelCheckpoint(…, every_n_train_steps=…)  # more steps",
        "evaluation": "Trainer(…, val_check_interval=…)  # more steps",
    },
    "transformers": {
        "progress": "TrainingArguments(…, disable_tqdm=True)",
        "logging": "TrainingArguments(…, logging_steps=…)  # more steps",
        "saving": "TrainingArguments(…, save_steps=…)  # more steps",
        "evaluation": "TrainingArguments(…, eval_steps=…)  # more steps",
    },
}


def at_once(used: Optimizer) -> str:
    """Return the optimizer with the option that updates all weights at once; "" if its type has no such option."""
    name, faster = (used.name, used.faster) if used.name else ("SGD", ("fused", "foreach"))
    other = "or foreach=True: " if len(faster) > 1 else ""
    return f"{name}(model.parameters(), …, {faster[0]}=True)  # {other}all weights at once" if faster else ""


def view(
    host: Host,
    profile: Profile,
    work: float = 1.0,
    step_ms: float = math.inf,
    used: Optimizer | None = None,
    wait: float = 1.0,
) -> HostWork:
    """Return the host's work in a step of `step_ms`.

    `work` is the share of the step without its wait for a batch, and `wait` the share of this wait.
    """
    # The largest possible gain: while a GPU is busy, the host's calls cost nothing
    limit = min(work, profile.host) if profile.on_device else work

    def between(one: float, other: float, limit: float = limit) -> Gain:
        least, most = sorted((min(one, limit), min(other, limit)))
        return Gain((least + most) / 2, least, most)

    # The trace shows not all Python code between the calls, and the samples of calls also contain other code
    calls = between(host.calls.share, host.calls.share)
    if host.calls.median_us > thresholds.SHORT_OPERATOR_US:  # one call for the whole sequence computes as much
        calls = between(0.0, host.calls.share)
    elif host.sampled_ms is not None and host.sampled_ms < thresholds.SLOWED_BY_SAMPLING * work * step_ms:
        calls = between(host.calls.share, host.calls.sampled_share * work) if calls.about else calls

    calls = Gain(*(each * host.calls.line_share for each in calls))  # a network's own calls stay

    def slowed(sampled: Work, work: float, limit: float) -> Gain:
        # The profiler slows operators, but hardly the code between them: the code's share is larger without it
        return between(sampled.share * work, sampled.ms / step_ms, limit)

    return HostWork(
        host,
        min(host.optimizer.share, limit),
        calls,
        min(host.elementwise, limit),
        min(host.updates, limit),
        slowed(host.outside, work, limit),
        between(0.0, host.constant.share * work)._replace(about=host.constant.share * work),
        slowed(host.around, 1.0, wait),
        slowed(host.framework.work, work, limit),
        used or Optimizer(),
    )


def _calls(calls: Calls, share: float) -> str:
    """Return as text the calls of the three operators with the longest total time, and the line that calls them."""
    names = [f"{printable(each.name)} {round(each.calls):,} times" for each in calls.operators[:3]]
    rest = len(calls.operators) - 3
    more = f" and {counted(rest, 'other operator')}" if rest > 0 else ""
    return (
        f"{', '.join(names)}{more}; the median call takes {calls.median_us:.0f} µs. The calls, with the code between "
        f"them, take {percent(share)} of the time.{mostly(calls.line)}"
    )


def _parts(framework: Framework, share: float) -> str:
    """Return which parts of a framework take a share of the time, as a sentence."""
    names = ", ".join(printable(part.name) for part in framework.parts[:3])
    return (
        f"In the steps, callbacks and loggers of {printable(framework.name)} take {percent(share)} of the time: mostly "
        f"{names}."
    )


def _where(work: Work) -> str:
    """Return the end of a sentence about other work: whether it mostly waits, or is recorded, and its line."""
    waits = ", and mostly waits" if work.waited >= work.share / 2 else ""
    recorded = ", and autograd records its operators for nothing" if work.recorded >= work.share / 2 else ""
    return f"{waits}{recorded}{f': mostly at {work.line}' if work.line else '.'}"


RULES: tuple[Rule[HostWork], ...] = (
    Rule(
        "host.optimizer-by-weight", "an optimizer that updates weights one by one", "host", "fewer launches",
        "The optimizer calls short operators for each weight tensor.",
        lambda view: view.optimizer,
        lambda view: f"In a step the optimizer calls {_calls(view.host.optimizer, view.optimizer)}",
        "{faster}",
        least=thresholds.HOST_WORK,
        example="SGD(model.parameters(), …, fused=True)  # or foreach=True: all weights at once",
        line=lambda view: view.host.optimizer.line,
    ),
    Rule(
        "host.small-operators", "many small operators", "host", "fewer launches",
        "A step calls short operators very often, for example in a Python loop.",
        lambda view: view.calls,
        lambda view: f"A step calls {_calls(view.host.calls, view.calls.about)}",
        "# one call for the whole batch, or the whole sequence, instead of a Python loop",
        least=thresholds.HOST_WORK,
        line=lambda view: view.host.calls.line,
    ),
    Rule(
        "host.elementwise", "large elementwise operators", "compute", "fewer launches",
        "Memory-bound operators, which compute little for each number that they read, take much of a step on the CPU.",
        lambda view: view.elementwise,
        lambda view: (
            f"Memory-bound operators, which compute little for each number that they read, take "
            f"{percent(view.elementwise)} of the time with their backward pass.{mostly(view.host.elementwise_line)}"
        ),
        "torch.compile(…)  # fuses several operators; or use a matrix product, as torch.cdist does for distances",
        least=thresholds.ELEMENTWISE,
        line=lambda view: view.host.elementwise_line,
    ),
    Rule(
        "host.updates", "an optimizer that takes most of the step", "compute", "larger batches",
        "Updating the weights takes most of the step. This time does not depend on the batch size.",
        lambda view: view.updates,
        lambda view: (
            f"Updating the weights takes {percent(view.updates)} of the time, and no less with a smaller batch."
            f"{mostly(view.host.updates_line)}"
        ),
        "{fewer_updates}",
        least=thresholds.UPDATES,
        example="SGD(model.parameters(), …, fused=True)  # or foreach=True: all weights at once\n# larger batches, or "
        "SparseAdam for a large nn.Embedding(sparse=True)",
        line=lambda view: view.host.updates_line,
    ),
    Rule(
        "host.other-work-in-steps", "the step does something else", "host", "work between the operators",
        "The step does work other than training, such as evaluating, logging or saving.",
        lambda view: view.outside,
        lambda view: f"For {percent(view.outside.about)} of the time a step does not train{_where(view.host.outside)}",
        lambda view: (
            "with torch.no_grad(): …  # and move this work out of the step, or do it every n-th step"
            if view.host.outside.recorded >= view.host.outside.share / 2
            else "# move this work out of the step, or do it every n-th step"
        ),
        example="# move this work out of the step, or do it every n-th step; evaluate within torch.no_grad()",
        least=thresholds.HOST_WORK,
        line=lambda view: view.host.outside.line,
    ),
    Rule(
        "host.constant-work", "work in the network that no gradient needs", "host", "work between the operators",
        "A trained network does work that no gradient needs. If its inputs do not change, once is enough.",
        lambda view: view.constant,
        lambda view: (
            f"For {percent(view.constant.about)} of a step the network does work that no gradient needs, perhaps on "
            f"inputs that never change{_where(view.host.constant)}"
        ),
        "# if the inputs do not change, such as a mask, or features of a frozen network: compute it once\n"
        "# otherwise in the dataset, whose workers run in parallel with the steps",
        least=thresholds.HOST_WORK,
        line=lambda view: view.host.constant.line,
    ),
    Rule(
        "host.framework-parts", "callbacks and loggers of the framework", "host", "work between the operators",
        "The package that runs the loop, such as Lightning, logs, saves or redraws a progress bar in the steps.",
        lambda view: view.parts,
        lambda view: _parts(view.host.framework, view.parts),
        "{settings}",
        least=thresholds.HOST_WORK,
        example="Trainer(…, log_every_n_steps=50)  # Lightning; transformers has TrainingArguments(…, logging_steps=…)",
    ),
    Rule(
        "host.other-work-between-steps", "work between the steps", "host", "work between the operators",
        "The loop does other work between the steps, outside of the DataLoader.",
        lambda view: view.around,
        lambda view: (
            f"For {percent(view.around.about)} of the time the loop does other work between the steps, outside of the "
            f"DataLoader{_where(view.host.around)}"
        ),
        "# do this work once, ahead of time, or in the dataset, whose workers run in parallel with the steps",
        least=thresholds.HOST_WORK,
        line=lambda view: view.host.around.line,
    ),
)  # fmt: skip
