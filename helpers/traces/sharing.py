"""Which memory of the CPU is not an allocator's, but shared with the workers of a DataLoader."""

from __future__ import annotations

from collections.abc import Iterable


def shared_with_workers(events: Iterable[tuple[int, int, int, int]]) -> list[bool]:
    """Return for each memory event of the CPU whether it maps or unmaps memory that is shared with a worker.

    To map a batch that a worker has put into shared memory is recorded like an allocation, but with 0 as the total
    allocated and its own size as the total reserved; to unmap it, with 0 as both. What the CPU's allocator does always
    has 0 reserved, and a total allocated that follows from the one before. So to unmap what had been mapped before the
    recording is known by a total of 0 that does not follow.

    Parameters
    ----------
    events : iterable of (address, change, allocated, reserved)
        In the order of time: where, by how many bytes, and the bytes allocated and reserved in all afterwards.
    """
    shared, mapped, before = [], set(), 0
    for address, change, allocated, reserved in events:
        maps = reserved > 0
        unmaps = allocated == 0 > change and (address in mapped or before + change != 0)
        if maps:
            mapped.add(address)
        elif unmaps:
            mapped.discard(address)
        else:
            before = allocated
        shared.append(maps or unmaps)
    return shared
