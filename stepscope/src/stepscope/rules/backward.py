"""Work of the backward pass that changes no weights."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope import thresholds
from stepscope.base.wording import counted, percent
from stepscope.facts.host import Gradients, Host, Optimizer
from stepscope.rules.rule import Gain, Rule, mostly


@dataclass(frozen=True)
class Passes:
    """A view of the backward passes; `work` is the share of a step without its wait."""

    host: Host
    gradients: Gradients
    optimizer: Optimizer
    work: float
    kernels: float | None  # share of a GPU's kernels in a step; None without a GPU

    @property
    def backward(self) -> float:
        """The share of the backward passes in a step: two thirds of the kernels, if a GPU computes."""
        if self.kernels is not None:
            return self.kernels * thresholds.BACKWARD
        return self.work * self.host.phases.get("backward", 0.0)

    @property
    def unused(self) -> Gain | None:
        """The gain without gradients that no optimizer uses, as if all gradients took equally long."""
        share, backward = self.gradients.unused, self.backward
        if share < thresholds.UNUSED_GRADIENTS:
            return None
        # The pass may have to go through a layer even if the gradients of its weights are not needed
        return Gain(share * backward, share * backward / 2, min(1.0, 1.5 * share) * backward)

    @property
    def dense(self) -> Gain:
        """The gain without dense gradients of embeddings: the largest weight tensor probably is an embedding's."""
        gradient, update = (self.work * share for share in (self.host.embedding, self.host.phases.get("update", 0.0)))
        return Gain(gradient + self.optimizer.largest * update, gradient, gradient + update)

    @property
    def changes(self) -> str:
        """The changes by which backward passes compute fewer gradients."""
        orphaned = self.gradients.orphaned >= self.gradients.discarded
        return FREEZE if orphaned else DETACH


FREEZE = "network.requires_grad_(False)  # of weights that no optimizer changes; eval() does not do this"
DETACH = (
    "outputs.detach()  # or torch.no_grad() around the forward pass of a network that this loss does not train\n"
    "network.requires_grad_(False)  # while a loss only goes through this network"
)


def _unused(view: Passes) -> str:
    found = view.gradients
    orphaned = f"{counted(found.orphaned, 'gradient')} of weights that no optimizer has" if found.orphaned else ""
    discarded = f"{counted(found.discarded, 'gradient')} that are freed unused" if found.discarded else ""
    which = " and ".join(filter(None, [orphaned, discarded]))
    return (
        f"Of {counted(found.computed, 'gradient')} of weight tensors in some steps, the backward passes computed "
        f"{which}. All backward passes take {percent(view.backward)} of a step.{mostly(view.host.backward_line)}"
    )


RULES: tuple[Rule[Passes], ...] = (
    Rule(
        "backward.unused-gradients", "gradients that no optimizer uses", "compute", "work between the operators",
        "Backward passes compute gradients that no optimizer uses, such as the gradients of a frozen network.",
        lambda view: view.unused,
        _unused,
        "{changes}",
        example=f"{FREEZE}\n{DETACH}",
        line=lambda view: view.host.backward_line,
    ),
    Rule(
        "backward.dense-embedding", "dense gradients of an embedding", "compute", "work between the operators",
        "An embedding's gradient has all its rows, of which a batch uses few, and the optimizer updates all of them.",
        lambda view: view.dense if view.dense.least >= thresholds.WORTH else None,
        lambda view: (
            f"The gradients of embeddings take {percent(view.dense.least)} of a step, since they contain all rows, and "
            f"a batch uses few rows. The update of all weights takes {percent(view.dense.most - view.dense.least)}."
        ),
        "nn.Embedding(…, sparse=True)  # with SGD or SparseAdam for its weights",
    ),
    Rule(
        "backward.repeated", "backward passes through the same graph", "compute", "work between the operators",
        "Backward passes go through parts of a graph that an earlier pass went through.",
        lambda view: view.host.repeated * view.backward,
        lambda view: (
            f"For {percent(view.host.repeated)} of their time the backward passes go through parts of a graph that an "
            f"earlier pass went through. They take {percent(view.backward)} of a step."
            f"{mostly(view.host.backward_line)}"
        ),
        "state = state.detach()  # before the next part of a sequence, without retain_graph=True\n"
        "(loss_1 + loss_2).backward()  # one pass for several losses",
        line=lambda view: view.host.backward_line,
    ),
)  # fmt: skip
