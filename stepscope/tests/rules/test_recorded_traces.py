"""Traces of a real GPU, an NVIDIA H200: each has the verdict that an engineer gave it first, and no unknown kernel."""

from pathlib import Path

import pytest

from stepscope import diagnosis, rules, traces

HERE = Path(__file__).parent / "h200"
COURSE = Path(__file__).parents[3] / "data" / "reference" / "h200" / "traces"  # where the course is around stepscope
# The first finding, and the sentence of an engineer who looked at the trace in TensorBoard
VERDICTS = {
    # A small network in float32: 79 kernels of 11 µs in a step of 5 ms, and one gap of 525 ms between two steps
    HERE / "a-stalled-step.pt.trace.json.gz": ["device.launch-bound", "device.host-does-other-work"],
    # The loop waits for a worker that reads and decodes PNG files, for 87% of the time
    COURSE / "01-naive-PNG-files": ["loader.too-slow", "device.launch-bound"],
    # ResNet-50 in bfloat16: the GPU is busy for 96% of the time, two thirds of it in normalization and elementwise work
    COURSE / "11-mixed-precision": ["device.memory-bound"],
}


@pytest.mark.parametrize("path", VERDICTS, ids=lambda path: path.name)
def test_a_trace_of_an_h200_has_the_findings_of_an_engineer_and_its_kernels_have_classes(path):
    if not path.exists():
        pytest.skip("stepscope stands alone here")
    assert [finding.key for finding in diagnosis.of_trace(path).findings] == VERDICTS[path]
    assert "other" not in traces.kernel_classes(path).index


def test_a_stalled_step_in_which_an_epoch_begins_is_named_as_that():
    facts = diagnosis.facts_of_trace(traces.load(HERE / "a-stalled-step.pt.trace.json.gz"))
    assert facts.profile.begins_epoch and facts.profile.stall_ms > 500
    assert "persistent_workers=True" in dict(rules.diagnose(facts).evidence)["steps"]
