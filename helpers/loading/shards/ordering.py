"""Which sample comes when, and who reads it: plain arithmetic on positions, without any store."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

#: What becomes of the samples at an epoch's end that do not fill a batch on each rank.
REMAINDERS = ("share", "drop", "repeat")


def order(
    samples: np.ndarray, *, seed: int, epoch: int, lanes: int = 8, shuffle: int = 1_000, chunk: int = 128
) -> np.ndarray:
    """Return the order of an epoch's samples: the same for all ranks and workers, whatever their numbers are.

    The pieces are shuffled, and divided into `lanes` of equal length but for a piece. Within its lane each sample is
    late by up to `shuffle` places, at random, so samples mix within a window of so many: about as in a shuffle buffer,
    but known before anything is read. Then the lanes take turns, `chunk` samples each. So a batch of one chunk comes
    from one lane, and if the number of readers (ranks times workers) divides the number of lanes, hardly any piece is
    read by two of them.

    Parameters
    ----------
    samples : ndarray of int, shape (pieces,)
        How many samples each piece has. Samples are numbered as the pieces hold them.
    seed, epoch : int
        Not negative.
    lanes : int
        As many as there will ever be readers, or a multiple.
    shuffle : int
        Samples of each lane's window; 0 keeps the order within pieces. All readers together have at
        most ``lanes * shuffle`` samples in memory, and a piece more for each lane, however many readers they are.
    chunk : int
        Samples that come from one lane at a time: the batch size, or a divisor of it.

    Returns
    -------
    ndarray of int64, shape (sum of `samples`,)
        The number of each sample, once. A new version of NumPy may permute otherwise: keep the one you began with.
    """
    if lanes < 1 or shuffle < 0 or chunk < 1:
        raise ValueError(
            f"Expected lanes and chunk of 1 or more and shuffle of 0 or more, found {lanes}, {chunk} and {shuffle}."
        )
    samples = np.asarray(samples, np.int64)
    random = np.random.default_rng((seed, epoch))
    pieces = random.permutation(len(samples))
    first, ends = np.cumsum(samples) - samples, np.cumsum(samples[pieces])
    begins, total = ends - samples[pieces], int(samples.sum())
    numbers = np.arange(total) + np.repeat(first[pieces] - begins, samples[pieces])
    lane = begins * lanes // max(total, 1)  # of each piece
    edges = np.append(begins, total)[np.searchsorted(lane, np.arange(lanes + 1))]
    turns = np.empty(total, np.int64)
    for begin, end in pairwise(edges):
        place = np.arange(end - begin)
        late = np.argsort(place + random.uniform(0, shuffle, end - begin), kind="stable")
        numbers[begin:end] = numbers[begin:end][late]
        turns[begin:end] = place // chunk
    return numbers[np.argsort(turns, kind="stable")]


def batches(
    total: int, batch: int, *, rank: int = 0, world: int = 1, start: int = 0, remainder: str = "share"
) -> list[range]:
    """Return the positions of each batch of one rank; all ranks have equally many batches, so none waits for another.

    Step by step, the ranks take `batch` positions each, rank 0 first.

    Parameters
    ----------
    total : int
        Positions in the epoch, from 0 on.
    batch : int
        Samples in a batch of one rank.
    rank, world : int
        This rank, and how many there are.
    start : int
        The first position that is not yet done.
    remainder : {"share", "drop", "repeat"}
        What becomes of the last samples, too few for a batch on each rank. "share": they are divided evenly, so each
        sample comes exactly once, and the ranks' last batches differ by one sample at most; if they are fewer than
        ranks, they join the step before. "drop": they are left out; since the order changes, others in each epoch.
        "repeat": the epoch's first samples fill the step up; their positions count on from `total`.

    Returns
    -------
    list of range
        Empty if nothing is left. With "share" and fewer samples than ranks in the whole, too, unless
        ``world`` is 1: there is no step that all ranks could take.

    Raises
    ------
    ValueError
        If a number is out of range, or there is no such remainder.
    """
    if remainder not in REMAINDERS:
        raise ValueError(f"Expected remainder to be one of {', '.join(REMAINDERS)}, found {remainder!r}.")
    if not (0 <= rank < world and batch > 0 and 0 <= start <= total):
        raise ValueError(
            f"Expected a rank below {world}, a batch of 1 or more and a start within the {total:,} samples, "
            f"found rank {rank}, batch {batch}, start {start:,}."
        )
    step = batch * world
    ends = list(range(start + step, total + 1, step))
    left = (total - start) % step
    if left and remainder == "repeat":
        ends.append(ends[-1] + step if ends else start + step)
    elif remainder == "share" and left >= world:
        ends.append(total)
    elif remainder == "share" and left and ends:
        ends[-1] = total
    found, begin = [], start
    for end in ends:
        size = end - begin
        found.append(range(begin + size * rank // world, begin + size * (rank + 1) // world))
        begin = end
    return found
