import os

import pytest
import torch
from torch import nn

from helpers.training import compiling


@pytest.fixture
def step():
    # Not model.compile(): of an nn.Sequential torch 2.11 then compiles what it calls, but no layer of PyTorch's own.
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()))
    return lambda images, labels: model(images)


@pytest.mark.processes
def test_without_a_compiler_it_says_what_to_install(step):
    with torch._inductor.config.patch({"cpp.cxx": (None, "/no/such/compiler")}), compiling.empty_cache():
        with pytest.raises(compiling.CannotCompile, match="apt install"):
            compiling.first_step(step, torch.rand(2, 4), None)


@pytest.mark.processes
def test_an_error_of_the_step_itself_stays_as_it_is(step):
    with pytest.raises(RuntimeError) as raised:
        compiling.first_step(step, torch.rand(2, 3), None)
    assert not isinstance(raised.value, compiling.CannotCompile)


def test_an_empty_cache_takes_the_place_of_the_compilers_own_for_a_while():
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with compiling.empty_cache():
        cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        assert cache != before and not os.listdir(cache)
    assert not os.path.exists(cache)
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
