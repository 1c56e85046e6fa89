"""Gradients that no optimizer uses, in small networks that really train."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from stepscope.facts.host import Gradients
from stepscope.observe.gradients import GradientWatcher


def layer(inputs=4, outputs=4):
    return nn.Linear(inputs, outputs, bias=False)


def sgd(*networks):
    return torch.optim.SGD([weight for network in networks for weight in network.parameters()], 1e-3)


def watched(step, steps=4):
    """Return the facts about gradients in some steps, after a first one."""
    step()
    watcher = GradientWatcher()
    with register_optimizer_step_post_hook(lambda optimizer, *_: watcher.updated(optimizer)):
        for _ in range(steps):
            step()
    return watcher.facts()


def test_all_gradients_of_usual_training_are_used():
    network, batch = nn.Sequential(layer(), nn.ReLU(), layer()), torch.rand(2, 4)
    optimizer = sgd(network)

    def step(set_to_none=True, passes=3):
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(passes):
            network(batch).sum().backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()

    assert watched(step) == watched(lambda: step(False)) == Gradients(8)


def test_a_network_in_evaluation_mode_is_not_frozen():
    backbone, head, batch = nn.Sequential(layer(), layer(), layer()).eval(), layer(4, 1), torch.rand(2, 4)
    optimizer = sgd(head)

    def step():
        optimizer.zero_grad()
        head(backbone(batch)).sum().backward()
        optimizer.step()

    found = watched(step)
    assert (found.computed, found.orphaned, found.discarded) == (16, 12, 0)
    backbone.requires_grad_(False)
    assert watched(step).unused == 0  # its old gradients stay
    backbone.requires_grad_(True)
    with torch.no_grad():
        features = backbone(batch)
    assert watched(lambda: (optimizer.zero_grad(), head(features).sum().backward(), optimizer.step())).unused == 0


def test_gradients_of_another_network_that_are_freed_unused_are_counted():
    generator, critic, noise = layer(), layer(4, 1), torch.rand(2, 4)
    optimizers = sgd(generator), sgd(critic)

    def step(detach):
        images = generator(noise)
        optimizers[1].zero_grad()
        critic(images.detach() if detach else images).sum().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        critic.requires_grad_(not detach)
        critic(generator(noise)).sum().backward()
        optimizers[0].step()
        critic.requires_grad_(True)

    found = watched(lambda: step(False))
    assert found.discarded >= 6 and found.orphaned == 0 and 0.4 < found.unused <= 0.5
    assert watched(lambda: step(True)).unused == 0


@pytest.mark.parametrize("flat", [False, True])
def test_weights_of_which_an_optimizer_has_copies_are_not_called_unused(flat):
    network, batch = nn.Sequential(layer(), layer(4, 1)), torch.rand(2, 4)
    weights = [*network.parameters()]
    copies = [nn.Parameter(each.detach().clone()) for each in ([torch.zeros(20)] if flat else weights)]
    optimizer = torch.optim.SGD(copies, 1e-3)

    def step():
        network.zero_grad()
        network(batch).sum().backward()
        gradients = [each.grad.clone() for each in weights]
        for copy, gradient in zip(
            copies, [nn.utils.parameters_to_vector(gradients)] if flat else gradients, strict=True
        ):
            copy.grad = gradient
        optimizer.step()

    assert watched(step).unused == 0
