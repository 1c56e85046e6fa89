"""Work for nothing that the content of batches shows: padding, and items that several workers yield."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope import thresholds
from stepscope.base.wording import counted, percent
from stepscope.facts.batches import Batch
from stepscope.rules.rule import Rule

_TO_THE_LONGEST = (
    'collate_fn: pad_sequence(…), or tokenizer.pad(…, padding="longest")  # of the batch, not to a fixed length'
)
_SIMILAR = "# batches of similar lengths: a sampler that sorts by length, or several sequences packed into one row"


@dataclass(frozen=True)
class Content:
    """A view of a batch; `computing` is the share of a step whose time depends on the number of positions."""

    batch: Batch
    computing: float
    yielded: int = 1  # times that an epoch has each item

    @property
    def padding(self) -> float | None:
        """The share of padding that a change can remove; None if it is slight.

        Batches that are padded to their longest sequence are only at fault if most of their positions are padding.
        """
        batch = self.batch
        if batch.padding >= thresholds.PADDING:
            return batch.padding
        return batch.beyond_the_longest if batch.beyond_the_longest >= thresholds.PADDING_OF_ALL else None


def _found(view: Content) -> str:
    batch = view.batch
    return (
        f"{percent(batch.padding)} of the positions in the sequences of a batch are padding, on which the step "
        f"computes for nothing. The tensor {f'{batch.place} ' * bool(batch.place)}has "
        f"{counted(batch.positions, 'position')} for each sequence, and the longest sequence fills {batch.longest}."
    )


def _shorter(view: Content) -> str:
    fixed = view.batch.beyond_the_longest >= thresholds.PADDING_OF_ALL
    uneven = not fixed or view.batch.padding >= thresholds.PADDING
    return "\n".join([_TO_THE_LONGEST] * fixed + [_SIMILAR] * uneven)


RULES: tuple[Rule[Content], ...] = (
    Rule(
        "batch.padding", "padding", "data", "padding",
        "Much of the sequences in a batch is padding, on which the step computes for nothing.",
        lambda view: None if view.padding is None else view.padding * view.computing,
        _found,
        _shorter,
        example=f"{_TO_THE_LONGEST}\n{_SIMILAR}",
    ),
    Rule(
        "loader.equal-workers", "workers that yield the same items", "data", "shards for each worker",
        "Each worker of an iterable dataset yields all its items, so that an epoch trains on each item several times.",
        lambda view: 1 - 1 / view.yielded if view.yielded > 1 else None,
        "All {yielded} workers yield the same batches, one after another: an epoch trains on each item {yielded} "
        "times, and has {yielded} times as many steps as without workers.",
        "info = torch.utils.data.get_worker_info()  # in the dataset's __iter__\n"
        "files = files[info.id :: info.num_workers] if info else files  # a part for each worker",
    ),
)  # fmt: skip
