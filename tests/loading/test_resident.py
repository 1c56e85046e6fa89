"""Images that lie on the device: every image once an epoch, in a new order."""

import torch

from helpers.loading.resident import OnDevice


def test_an_epoch_has_every_image_once_but_for_what_is_left_over():
    images, labels = torch.arange(10).view(10, 1), torch.arange(10) * 2
    loader = OnDevice(images, labels, 4)
    batches = list(loader)
    assert len(loader) == len(batches) == 2
    seen = torch.cat([batch for batch, _ in batches]).flatten()
    assert len(set(seen.tolist())) == 8
    assert torch.equal(torch.cat([batch for _, batch in batches]), seen * 2)


def test_the_order_is_another_in_each_epoch_and_follows_the_seed():
    loader = OnDevice(torch.arange(100), torch.arange(100), 10)
    torch.manual_seed(0)
    first, second = (torch.cat([batch for batch, _ in loader]) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(torch.cat([batch for batch, _ in loader]), first)
