"""Looks into batches for work for nothing: padding of sequences, and batches that several workers yield."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch

from stepscope import thresholds
from stepscope.facts.batches import Batch

_MASK = "attention_mask"  # end of a name: zeros at the ends of a sequence are padding
_DEPTH, _MEMBERS = 4, 100  # limits of the search in a batch
_SAMPLED = 1_000  # elements of a tensor that stand for all


def _leaves(batch: object, place: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield what is in a batch, with its place: in mappings, sequences and objects with attributes."""
    inside: list[tuple[str, object]] = []
    if isinstance(batch, torch.Tensor | np.ndarray | str | bytes | int | float):
        yield place, batch
    elif isinstance(batch, Mapping):
        inside = [(f"{place}.{key}".lstrip("."), value) for key, value in batch.items()]
    elif isinstance(batch, list | tuple):
        inside = [(f"{place}[{index}]", value) for index, value in enumerate(batch[:_MEMBERS])]
    elif hasattr(batch, "__dict__") and not isinstance(batch, type):
        inside = [(f"{place}.{name}".lstrip("."), value) for name, value in vars(batch).items()]
    for where, value in inside[:_MEMBERS] if depth < _DEPTH else []:
        yield from _leaves(value, where, depth + 1)


def padding(batch: object) -> Batch:
    """Return how much of a batch's sequences is padding, by its attention masks; without masks, by its tokens."""
    found = [(place, each) for place, each in _leaves(batch) if isinstance(each, torch.Tensor) and _dense(each)]
    masks = [(place, each, _within_mask(each)) for place, each in found if place.endswith(_MASK) and each.ndim == 2]
    rows = masks or [(place, each, lengths) for place, each in found if (lengths := _lengths(each)) is not None]
    rows = [(place, each, lengths) for place, each, lengths in rows if each.numel()]
    if not rows:
        return Batch()
    total = sum(each.size(0) * each.size(1) for _, each, _ in rows)
    real = sum(int(lengths.sum()) for *_, lengths in rows)
    place, largest, lengths = max(rows, key=lambda row: row[1].size(0) * row[1].size(1))
    return Batch(1 - real / total, largest.size(1), int(lengths.max()), place)


def _within_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return the positions from the first to the last nonzero element of each row; int64, shape (rows,)."""
    real = (mask != 0).long()
    return ((real.cumsum(1) > 0) & (real.flip(1).cumsum(1).flip(1) > 0)).sum(1)


def _lengths(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the length of each sequence without padding; int64, shape (rows,). None if the rows are no sequences.

    Sequences are token numbers, shape (rows, positions), or frames of features, shape (rows, positions, features).
    Smaller integer types are images; negative numbers are labels; two values are a mask, or flags.
    """
    tokens = tensor.dtype in (torch.int32, torch.int64) and tensor.ndim == 2
    frames = tensor.is_floating_point() and tensor.ndim == 3
    if not (tokens or frames) or tensor.size(0) < 2 or tensor.size(1) < thresholds.LEAST_POSITIONS:
        return None
    if tokens and not (tensor.min() >= 0 and tensor.max() > 1):
        return None
    known = [each for end in ((-1, 0) if tokens else (-1,)) if (each := _padded_at(tensor, end)) is not None]
    return min(known, key=lambda lengths: int(lengths.sum()), default=None)


def _padded_at(tensor: torch.Tensor, end: int) -> torch.Tensor | None:
    """Return the lengths of sequences that are padded at the end −1 or 0, shape (rows,); None if that is not certain.

    Padding repeats one value, which sequences of different lengths hardly contain themselves.
    """
    same = _runs(tensor == tensor[:, end].unsqueeze(1), end)
    same[same == tensor.size(1)] = 0  # all values are equal: the row does not show where its padding begins
    value = tensor[same.argmax(), end]
    equal = tensor == value
    padded = _runs(equal, end)
    lengths = tensor.size(1) - padded
    positions = equal if equal.ndim == 2 else equal.all(2)
    within = positions.sum() - padded.sum()
    sure = within <= thresholds.PADDING_WITHIN * lengths.sum() and lengths.min() < lengths.max()
    return lengths if sure else None


def _runs(equal: torch.Tensor, end: int) -> torch.Tensor:
    """Return how many positions in a row are True, counted from an end; int64, shape (rows,)."""
    positions = equal if equal.ndim == 2 else equal.all(2)
    return (positions if end == 0 else positions.flip(1)).long().cumprod(1).sum(1)


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def digest(batch: object) -> int | None:
    """Return a number that is equal for batches of equal content, as some elements show it; None if there is none."""
    parts = list[object]()
    for _, leaf in _leaves(batch):
        if isinstance(leaf, torch.Tensor):
            if not _dense(leaf) or leaf.device.type != "cpu" or not leaf.numel():
                continue
            flat = leaf.detach().reshape(-1)
            leaf = flat[:: max(1, len(flat) // _SAMPLED)].clone().view(torch.uint8).numpy()
        if isinstance(leaf, np.ndarray):
            leaf = leaf.reshape(-1)[:: max(1, leaf.size // _SAMPLED)].tobytes()
        parts.append(leaf)
    return hash(tuple(parts)) if parts else None


def equal_workers(passes: Sequence[Sequence[int | None]], workers: int) -> bool:
    """Return whether all workers yield equal batches, by the digests of consecutive batches.

    The batches of the workers take turns: then each batch comes as often as there are workers, one after another. The
    first and the last batch of consecutive ones may come less often.
    """
    runs = [[(each, len([*equal])) for each, equal in groupby(digests)] for digests in passes]
    lengths = [length for of_pass in runs for _, length in of_pass]
    inner = [length for of_pass in runs for _, length in of_pass[1:-1]]
    different = {each for of_pass in runs for each, _ in of_pass}
    return (
        workers > 1
        and None not in different
        and len(different) == len(lengths)
        and lengths.count(workers) >= thresholds.REPEATED_BATCHES
        and max(lengths) == workers
        and all(length == workers for length in inner)
    )
