"""Looks for weights with gradients that no optimizer uses, such as the weights of a network that should be frozen."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

import torch

from stepscope.facts.host import Gradients


class _State(NamedTuple):
    """A gradient at an update."""

    gradient: weakref.ref[torch.Tensor]
    version: int  # changes when the gradient does

    def __eq__(self, other: object) -> bool:  # a reference to a tensor would compare the tensor's numbers
        return isinstance(other, _State) and self.gradient is other.gradient and self.version == other.version

    def __ne__(self, other: object) -> bool:
        return not self == other


def _state(gradient: torch.Tensor) -> _State:
    return _State(weakref.ref(gradient), gradient._version)


class GradientWatcher:
    """Follows the gradients of all weights in this process from one update to the next, for a few steps.

    A gradient is unused if no optimizer has its weight, or if it is freed before the weight's optimizer updates. A
    gradient that is set to zero in place counts as used, because it cannot be told from a gradient that is added to.
    """

    def __init__(self) -> None:
        self._weights: list[weakref.ref[torch.nn.Parameter]] = []
        self._owned = set[int]()  # `id` of each weight that an optimizer has
        for each in gc.get_objects():
            kinds = type(each).__mro__  # `isinstance` would call code of the script
            if torch.nn.Parameter in kinds and each.requires_grad:
                self._weights.append(weakref.ref(each))
            elif torch.optim.Optimizer in kinds:
                with suppress(Exception):  # its constructor has not ended
                    self._owned |= _weights_of(each)
        # Gradients with their versions, by the number of the weight: older than this watch, or used by the weight's
        # optimizer; and seen at updates by other optimizers since
        self._used, self._pending = dict[int, _State](), dict[int, _State]()
        for number, reference in enumerate(self._weights):
            weight = reference()
            if weight is not None and weight.grad is not None:
                self._used[number] = _state(weight.grad)
        self._computed, self._orphaned, self._discarded = (Counter[tuple[int, ...]]() for _ in range(3))  # by shape

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients after an update by one optimizer."""
        own = _weights_of(optimizer)
        for number, reference in enumerate(self._weights):
            weight = reference()
            if weight is None:
                continue
            shape, gradient, before = tuple(weight.shape), weight.grad, self._pending.pop(number, None)
            freed = before is not None and before.gradient() is not gradient
            self._discarded[shape] += freed and id(weight) in self._owned
            if gradient is None:
                continue
            now = _state(gradient)
            if id(weight) in own:
                self._computed[shape] += before is None or freed
                self._used[number] = now
            elif now != self._used.get(number):
                self._pending[number] = now
                self._computed[shape] += now != before
                self._orphaned[shape] += now != before and id(weight) not in self._owned

    def facts(self) -> Gradients:
        """Return how many gradients were computed, and how many of them no optimizer used."""
        used = self._computed - self._orphaned - self._discarded
        # An optimizer may have copies of the weights, for example in another precision, or all in one flat tensor
        if +self._orphaned and (not self._orphaned - used or all(len(shape) < 2 for shape in used)):
            return Gradients()
        counts = (sum(each.values()) for each in (self._computed, self._orphaned, self._discarded))
        return Gradients(*counts)


def _weights_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(weight) for group in optimizer.param_groups for weight in group["params"]}
