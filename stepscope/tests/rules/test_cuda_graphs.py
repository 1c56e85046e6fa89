"""CUDA graphs: the host launches all kernels of a step at once, so gaps between them are no waits for a launch."""

from support.cuda_trace import TENSOR_CORE_PRODUCT, Loop

from stepscope import diagnosis


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


def test_gaps_within_a_graph_are_no_launch_bound_steps(tmp_path):
    options = dict(loading=10, host_work=10, copy=10, kernels=((TENSOR_CORE_PRODUCT, 20),) * 40, launch=60)
    launched, graphed = (diagnosis.of_trace(kind(**options).write(tmp_path / "trace.json")) for kind in (Loop, Graphed))
    assert [finding.key for finding in launched.findings] == ["device.launch-bound"]
    assert graphed.findings == ()


def test_there_is_no_verdict_if_kernels_of_graphs_seem_to_be_missing(tmp_path):
    """Kernels of 20 us begin 60 us apart, all launched at once: nobody knows for what the GPU waits."""
    loop = Graphed(loading=10, host_work=10, copy=10, kernels=((TENSOR_CORE_PRODUCT, 20),) * 40, launch=60)
    found = diagnosis.of_trace(loop.write(tmp_path / "trace.json"))
    assert found.verdict == "unknown"
    assert any("lacks kernels of CUDA graphs" in text for text in found.unknown)
