"""What several tests of training use."""

import pytest
import torch


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, torch.arange(8) % 10
