"""CUDA graphs: the host launches all kernels of a step at once, so gaps between them are no waits for a launch."""

import pytest
from support.cuda_trace import TENSOR_CORE_PRODUCT, Loop

from stepscope import diagnosis


def keys(folder, loop):
    return [finding.key for finding in diagnosis.of_trace(loop.write(folder / "trace.json")).findings]


class Graphed(Loop):
    """A loop whose kernels run as they do without a graph, launched by one call in each step."""

    def trace(self):
        content = super().trace()
        launch = None
        for each in content["traceEvents"]:
            if each["name"].startswith("ProfilerStep"):
                launch = None
            if each["cat"] in ("cuda_runtime", "kernel") and "correlation" in each["args"]:
                launch = launch or each["args"]["correlation"]
                name = {"cuda_runtime": "cudaGraphLaunch"}.get(each["cat"], each["name"])
                each.update(name=name, args=each["args"] | {"correlation": launch})
        return content


@pytest.mark.parametrize(("kind", "found"), [(Loop, True), (Graphed, False)])
def test_gaps_within_a_graph_are_no_launch_bound_steps(tmp_path, kind, found):
    loop = kind(loading=10, host_work=10, copy=10, kernels=((TENSOR_CORE_PRODUCT, 20),) * 40, launch=60)
    assert ("device.launch-bound" in keys(tmp_path, loop)) == found
