"""The content of batches, as far as it shows work for nothing: padding."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """The sequences in one batch; by default none are known. A position has one token, or one frame of features."""

    padding: float = 0.0  # share of all positions that are padding
    positions: int = 0  # positions of a sequence, with its padding, in the largest tensor of sequences
    longest: int = 0  # positions of the longest sequence in this tensor, without padding
    place: str = ""  # of this tensor in the batch, such as "input_ids" or "[0]"

    @property
    def beyond_the_longest(self) -> float:
        """Share of the positions that are padding in every sequence of the batch."""
        return 1 - self.longest / self.positions if self.positions else 0.0
