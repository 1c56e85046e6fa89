"""The state of a GPU, from answers such as NVML gives them, and what a diagnosis says of it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from support import cuda_trace

from stepscope import diagnosis, rules, traces
from stepscope.facts.loop import Card, Loop, Machine, Step
from stepscope.observe import card

pynvml = pytest.importorskip("pynvml")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose NVML answers; set `reasons` and `processes`. It does not know its power."""
    state = SimpleNamespace(reasons=0, processes=1)

    def unknown(gpu):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetClockInfo": lambda gpu, kind: 1200,
        "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: 1980,
        "nvmlDeviceGetPowerUsage": unknown,
        "nvmlDeviceGetEnforcedPowerLimit": unknown,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: state.reasons,
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [None] * state.processes,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid="1"))
    return state


def test_limits_and_other_processes_are_read_and_an_unknown_power_hides_nothing(gpu):
    gpu.reasons = pynvml.nvmlClocksThrottleReasonSwThermalSlowdown | pynvml.nvmlClocksThrottleReasonSwPowerCap
    gpu.processes = 3
    assert card.seen() == Card(1200, 1980, 0, 0, ("its power limit", "its temperature"), 2)


def test_a_driver_that_fails_is_no_error_and_a_cpu_has_no_card(gpu, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: 1 / 0)
    assert card.seen() is None
    monkeypatch.undo()
    assert torch.cuda.is_initialized() or card.seen() is None


@pytest.mark.parametrize(
    ("limits", "others", "said"),
    [
        (("its power limit",), 0, []),  # as usual under load
        (("its temperature",), 0, ["its temperature held its clock at 61%"]),
        ((), 1, ["1 other process had this GPU"]),
    ],
)
def test_a_diagnosis_says_what_slowed_its_gpu(tmp_path, limits, others, said):
    trace = traces.load(cuda_trace.Loop(read="aten::item").write(tmp_path / "loop.pt.trace.json"))
    machine = Machine("Made-up GPU", "", 2, "2.15.0", "3.11.0", True, card=Card(1200, 1980, 650, 700, limits, others))
    loop = Loop((Step(1.0, 20.0),) * 8, 160.0, asynchronous=True)
    found = rules.diagnose(dataclasses.replace(diagnosis.facts_of_trace(trace), machine=machine, loop=loop))
    assert dict(found.evidence)["clock of the GPU"].startswith("1,200 of 1,980 MHz, at 650 of 700 W")
    about = [each for each in found.unknown if "GPU" in each]
    assert len(about) == len(said) and all(words in each for words, each in zip(said, about, strict=True))
