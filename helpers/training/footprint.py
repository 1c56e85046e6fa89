"""The memory of a training step's tensors, counted operator by operator: also of a step that is not computed."""

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> int:
    """Return the most bytes that tensors hold at one time in a step: weights, optimizer, batch, and what it makes.

    Counted is a step in which the optimizer has its state: if it has none yet, it takes a step with gradients of zero
    before, so that each weight that may learn has its state. If `step` leaves gradients, the next step is counted.
    Storages count once, however many tensors look at them. What a library takes for itself inside an operator does not
    count.

    `step` takes no argument: forward, backward, the optimizer's step, and ``zero_grad()`` at its end. Under
    ``torch._subclasses.FakeTensorMode``, which `model`, `optimizer` and `step` must then share, nothing is computed,
    and no memory is taken: the result is the same.
    """
    if not optimizer.state:
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()
    peak = _counted(model, optimizer, step)
    left = any(weight.grad is not None for weight in model.parameters())
    return _counted(model, optimizer, step) if left else peak


def _counted(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> int:
    with _Counter() as counter:
        counter.add([*model.parameters(), *model.buffers(), *(weight.grad for weight in model.parameters())])
        counter.add([list(state.values()) for state in optimizer.state.values()])
        step()
    return counter.peak


class _Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, weakref.ref] = {}  # those that exist, by identity

    def add(self, tensors: object) -> None:
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()  # a storage without memory has no address, but an identity
            if key not in self._storages:
                self._storages[key] = weakref.ref(storage, partial(self._freed, key, size))
                self.now += size
                self.peak = max(self.peak, self.now)

    def _freed(self, key: int, size: int, _: weakref.ref) -> None:
        del self._storages[key]
        self.now -= size

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.add((args, kwargs))  # the batch, which existed before
        result = operator(*args, **(kwargs or {}))
        self.add(result)
        return result
