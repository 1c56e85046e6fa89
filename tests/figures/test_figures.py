import base64
import dataclasses
import functools
import html
import io
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from support import cuda_trace
from support.rank_traces import ddp
from support.timed import compared, rounds

from helpers import figures, simulate
from helpers.results import scoreboard
from helpers.training import roofline
from stepscope import timing, traces
from stepscope.base.confidence import Interval

SOURCE = "a simulated GPU, drawn images"


def steps(loading, step_time):
    table = pd.DataFrame(0.0, index=pd.Index([5, 6], name="step"), columns=traces.CATEGORIES)
    table["DataLoader"], table["CPU Exec"] = loading, step_time
    return table


COMPARED = compared(300, 310, 320, before=[100, 118, 111])


def clocks(workers):
    return timing.TwoClocks(rounds(3300, 3100), rounds(9000, 9100), rounds(2300, 2200), workers)


@pytest.fixture
def rungs(tmp_path, monkeypatch):
    """The ladder: one rung of a simulated step, and two of a network."""
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path))
    baselines = {"03 more workers": "before", "09 ResNet-50": None, "10 channels_last": "before"}
    for rung, baseline in baselines.items():
        step = "a step" if rung < "08" else "ResNet-50"
        scoreboard.add(rung, COMPARED, "now", baseline=baseline, loader=[], step=step, data="CIFAR-10")
    return scoreboard.ladder()


def gpu(triton=cuda_trace.TRITON):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps(cuda_trace.trace()).replace(cuda_trace.TRITON, triton))
        return traces.load(path)


def placed(tflops):
    work = roofline.Work(flops=round(tflops * 1e10), bytes=10**8)
    return roofline.Placed(work, roofline.Limits(2.0, 100.0), step_ms=10.0, loading_share=0.0)


def formats():
    image = torch.zeros(1, 3, 2, 4)
    return {"contiguous": image, "channels_last": image.contiguous(memory_format=torch.channels_last)}


def curve(*allocated):
    return pd.DataFrame({"time": range(len(allocated)), "device": "CPU", "allocated": allocated})


@functools.cache
def ranks():
    with tempfile.TemporaryDirectory() as folder:
        return traces.ranks(ddp(Path(folder), loading={1: 50}))


def scaled():
    measured, predicted = [100.0, 190.0, np.nan, 100.0, 150.0], [100.0, 195.0, 720.0, np.nan, np.nan]
    kinds = {"kind": ["weak"] * 3 + ["strong"] * 2, "ranks": [1, 2, 8, 1, 2]}
    return pd.DataFrame(kinds | {"images/s": measured, "predicted": predicted})


def of_a_class():
    rows = [
        ("03 more workers to 01", 2.0, 1.5, 3.0, "faster"),
        ("03 more workers to 01", 0.8, 0.7, 0.9, "slower"),
        ("04 bytes to 03", 1.0, 0.99, 1.01, "equal"),
        ("04 bytes to 03", 1.2, 0.0, np.inf, "too noisy to say"),
    ]
    return pd.DataFrame(rows, columns=["rung", "ratio", "lowest", "highest", "outcome"])


def trained():
    """Two trainings naively, one as the course has it, which reaches the goal in its second epoch."""
    rows = [(True, 0, 60, 0.3), (True, 0, 120, 0.5), (True, 1, 70, 0.4), (False, 0, 5, 0.4), (False, 0, 9, 0.62)]
    return pd.DataFrame(rows, columns=["naive", "started", "seconds", "accuracy"]).assign(goal=0.6)


PICTURES = {
    "image_grid": lambda: figures.image_grid(np.zeros((3, 32, 32, 3), np.uint8), [0, 1, 1], ["cat", "dog"], SOURCE),
    "breakdown": lambda: figures.breakdown({"one": steps(8000, 5000), "two": steps(2000, 5000)}, SOURCE),
    "comparison": lambda: figures.comparison(COMPARED, SOURCE),
    "two_clocks": lambda: figures.two_clocks({"no workers": clocks(0), "2 workers": clocks(2)}, SOURCE),
    "access": lambda: figures.access(
        pd.DataFrame({"by item": [1e4, 2e4], "cold": [5e3, np.nan]}, ["npy", "tar"]), {"PNG files": 3e3}, SOURCE
    ),
    "curves": lambda: figures.curves({"training": [2.3, 2.1, 1.9]}, SOURCE),
    "item_timeline": lambda: figures.item_timeline({"1 worker": np.array([[0, 1.0, 1.5], [0, 1.5, 2.0]])}),
    "phases": lambda: figures.phases(pd.DataFrame({"loading": [5.0], "forward": [7.0]}, ["batch 32"]), SOURCE),
    "accuracies": lambda: figures.accuracies({"in batches": np.array([[0.3, 0.4], [0.2, 0.5]])}, SOURCE),
    "time_to_accuracy": lambda: figures.time_to_accuracy(trained(), SOURCE),
    "throughput": lambda: figures.throughput(
        pd.DataFrame({"MB": [0.1, 0.1, 8.0, 8.0], "connections": [1, 1, 4, 16], "seconds": [0.03, 0.04, 0.4, 0.3]}),
        lambda requests, size, connections: 0.03 + size / connections / 25e6,
        pd.DataFrame({"MB": [0.1, 2.0], "connections": [1, 4], "MB/s": [2.5, 11.0]}),
        12.0,
        SOURCE,
    ),
    "memory": lambda: figures.memory({"list": {1000: 1.0, 9000: 8.0}, "array": {1000: 0.0, 9000: 0.0}}),
    "gpu": lambda: figures.gpu(gpu(), SOURCE),
    "kernels": lambda: figures.kernels(traces.kernels(gpu()), SOURCE),
    "roofline": lambda: figures.roofline(
        lambda intensity, tflops, gb: min(tflops, intensity * gb / 1e3),
        {"float32": placed(0.5), "TF32": placed(1.5)},
        pd.DataFrame({"gflop": [9.0, 0.1], "mb": [90.0, 200.0], "ms": [6.0, 2.0]}, ["convolution", "ReLU"]),
        SOURCE,
    ),
    "memory_formats": lambda: figures.memory_formats(formats()),
    "number_formats": figures.number_formats,
    "gradients": lambda: figures.gradients({"start": {"weights": 2.0 ** -torch.arange(30)}}, 2.0**16, SOURCE),
    "kernel_classes": lambda: figures.kernel_classes(
        {"eager": pd.Series({"normalization": 24.0, "layout": 0.3}), "compiled": pd.Series({"compiled": 14.0})}, SOURCE
    ),
    "memory_curves": lambda: figures.memory_curves({"one": curve(5.0, 90.0), "two": curve(40.0, 90.0)}, SOURCE),
    "run_ahead": lambda: figures.run_ahead(
        {"never asks": pd.DataFrame({"host": [8.0, 16.0], "device": [14.0, 23.0]})}, SOURCE
    ),
    "time_lines": lambda: figures.time_lines(
        {
            "one stream": simulate.SimulatedDevice(kernels=3, copy_us=50).run(9),
            "two streams": simulate.SimulatedDevice(kernels=3, copy_us=50, streams=2, asks=True).run(9),
        },
        steps=2,
    ),
    "communication": lambda: figures.communication({"a straggler": traces.communication(ranks())}, SOURCE),
    "rank_timeline": lambda: figures.rank_timeline(ranks(), SOURCE),
    "scaling": lambda: figures.scaling(scaled(), SOURCE),
    "ratios": lambda: figures.ratios(of_a_class()),
    "calculated": lambda: figures.calculated(
        pd.DataFrame({"change": ["TF32", "bfloat16"], "before": [0.9, 1.1], "after": [1, 1.1], "gain": [1.1, 1.0]})
    ),
    "utilization": lambda: figures.utilization_and_efficiency([(0, 6, 0.1), (7, 9, 1.0)]),
}


WITHOUT_A_SOURCE = "item_timeline memory memory_formats number_formats time_lines ratios calculated utilization".split()


@functools.cache
def draw(name):
    return PICTURES[name]()


@pytest.mark.parametrize("name", PICTURES)
def test_a_figure_is_a_png_with_words_for_it_and_its_source_in_both(name):
    picture = draw(name)
    shown = re.fullmatch('<img alt="(.+)" style=".+" src="data:image/png;base64,(.+)">', picture._repr_html_())
    alt, data = shown.groups()
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
    assert (pixels != 255).any(axis=2).mean() > 0.01
    assert len(picture.alt) > 40 and picture.alt.endswith(".") and ": ;" not in picture.alt  # a list of nothing
    assert alt == html.escape(picture.alt, quote=True)
    for axes in picture.figure.axes:
        panels = axes.get_shared_x_axes().get_siblings(axes)  # of panels one above the other the last one has the label
        assert not (axes.axison and axes.get_ylabel()) or any(panel.get_xlabel() for panel in panels)
    titles = (picture.figure.get_suptitle() + picture.figure.get_supxlabel()).replace("\n", " ")
    assert name in WITHOUT_A_SOURCE or (SOURCE in titles and SOURCE in picture.alt)


WORDS = {
    "gpu": ["GPU 0, stream 7: kernels 48%", "GPU 0, stream 20: communication 10%"],
    "communication": ["rank 0: step 207 ms, overlapped 90 ms, transfer 36 ms, waiting 20 ms", "waiting 0 ms"],
    "rank_timeline": [
        "waiting for the last rank 42%",
        "rank 1: loading 24%, computing: kernels 73%, communication: tr",
    ],
    "roofline": [
        "float32: 0.5 TFLOP/s, 25% of its peak at 50 operations",
        "ReLU: 25% of the time at 0.5",
        "memory: 100 GB/s",
    ],
    "scaling": ["2 ranks 190 (95%), 8 ranks 720 (90%)", "2 ranks 150 (75%)"],
    "throughput": ["1 connection, requests: 0.1 MB 2.92", "4 connections, epochs: 2 MB 11", "any size 12"],
    "time_to_accuracy": ["50% in 70 to 120 s", "62% in 9 to 9 s"],
}


@pytest.mark.parametrize(("name", "said"), WORDS.items(), ids=WORDS)
def test_the_words_have_the_figures(name, said):
    assert [text for text in said if text not in draw(name).alt] == []


def test_the_host_is_ahead_by_the_time_until_the_device_has_done_the_same_step():
    assert list(draw("run_ahead").figure.axes[0].lines[0].get_ydata()) == [6.0, 7.0]


def test_each_simulated_launch_and_what_it_launched_are_drawn_on_one_time_axis_and_linked():
    one, two = draw("time_lines").figure.axes
    assert [label.get_text() for label in two.get_yticklabels()] == ["host", "GPU: stream 7", "GPU: stream 20"]
    assert one.get_xlim() == two.get_xlim()
    run = simulate.SimulatedDevice(kernels=3, copy_us=50).run(2)
    bars = [(bar.get_x(), bar.get_width()) for bar in one.patches]
    assert bars == [(span.start, span.end - span.start) for span in run.spans.itertuples()]
    links = [tuple(path.vertices[:, 0]) for path in one.collections[0].get_paths()]
    launches, launched = run.spans[run.spans["lane"] == "host"], run.spans[run.spans["lane"] != "host"]
    assert links == list(zip(launches["end"], launched["start"], strict=True))


def test_the_bars_of_a_step_are_as_high_as_its_parts():
    bars = figures.breakdown({"one": steps(8000, 5000)}, SOURCE).figure.axes[0].patches
    assert {bar.get_y() + bar.get_height() for bar in bars} in ({5.0, 13.0}, {8.0, 13.0})


def test_a_kernels_name_is_drawn_as_it_is_and_no_formula():
    figures.kernels(traces.kernels(gpu(r"$\\frac{$\u001b[2J")), SOURCE).png()


def widths(axes):
    return [bar.get_width() for bar in axes.patches]


def test_a_rung_of_the_ladder_is_a_pair_of_bars_whose_waiting_and_rest_are_shares_of_the_time_before(rungs):
    workers, resnet, _ = rungs
    workers = dataclasses.replace(
        workers, ratio=Interval(2.0, 1.9, 2.1, 5), loading_share=0.25, baseline_loading_share=0.75
    )
    picture = figures.ladder([workers, resnet])
    (axes,) = picture.figure.axes
    assert widths(axes) == pytest.approx([0.75, 0.25, 0.125, 0.375, 0.25, 0.75])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["before: “before”", workers.rung, resnet.rung]
    assert [text.get_text() for text in axes.texts] == ["155 → 310 images/s\n2.00× (1.90 – 2.10)", "310 images/s"]
    assert "03 more workers: 155 → 310 images/s, 2.00× (1.90 – 2.10)" in picture.alt


def test_a_bar_before_is_not_divided_if_its_waiting_is_unknown(rungs):
    old = dataclasses.replace(rungs[0], ratio=Interval(0.5, 0.4, 0.6, 5), baseline_loading_share=None)
    assert widths(figures.ladder([old]).figure.axes[0]) == pytest.approx([1, 0.5, 1.5])


def test_a_rung_that_is_too_noisy_says_so_and_one_that_is_far_slower_ends_in_an_arrow(rungs):
    noisy, slow = (
        dataclasses.replace(rungs[0], ratio=ratio)
        for ratio in (Interval(1.1, 0.5, 2.4, 3), Interval(0.1, 0.08, 0.12, 5))
    )
    (axes,) = figures.ladder([noisy, slow]).figure.axes
    assert "too noisy" in axes.texts[0].get_text() and "0.10×" in axes.texts[1].get_text()
    assert axes.get_xlim()[1] == 2 and [line.get_marker() for line in axes.lines] == [">", "None"]


def test_all_words_of_a_ladder_lie_within_the_figure(rungs):
    long = dataclasses.replace(rungs[2], baseline="a variant that has a name of quite many words")
    picture = figures.ladder([rungs[0], long])
    picture.figure.draw_without_rendering()
    (axes,) = picture.figure.axes
    ends = [text.get_window_extent() for text in (*axes.texts, *axes.get_yticklabels())]
    assert min(end.x0 for end in ends) >= 0 and max(end.x1 for end in ends) <= picture.figure.bbox.x1
    (empty,) = figures.ladder([]).figure.axes
    assert "No result yet" in empty.texts[0].get_text() and not empty.axison


def test_without_a_gpu_a_change_for_gpus_is_shown_as_one_recorded_it(rungs, monkeypatch):
    own = dataclasses.replace(rungs[2], rung="11 mixed precision", device="CPU")
    monkeypatch.setattr(scoreboard, "ladder", lambda path=None, every=scoreboard.ladder: every(path) if path else [own])
    (axes,) = figures.ladder().figure.axes
    assert "recorded on NVIDIA H200" in axes.texts[0].get_text()
    hatched = figures.ladder([own])
    assert {bar.get_hatch() for bar in hatched.figure.axes[0].patches} == {"///"} and "hatched" in hatched.alt


def test_elements_are_drawn_where_they_lie_in_memory():
    for axes, neighbours in zip(figures.memory_formats(formats()).figure.axes, ("R\n0,1", "G\n0,0"), strict=True):
        words = {round(text.get_position()[0]): text.get_text() for text in axes.texts}
        assert len(words) == 24 and (words[0], words[1]) == ("R\n0,0", neighbours)


def test_each_reader_of_a_class_is_a_mark_in_the_band_of_its_rung():
    axes = draw("ratios").figure.axes[0]
    marks = {bars.get_label(): bars.lines[0].get_xydata()[0].tolist() for bars in axes.containers}
    places = {name: (x, round(y)) for name, (x, y) in marks.items()}
    assert places == {"faster": (2, 0), "slower": (0.8, 0), "equal": (1, 1), "too noisy to say": (1.2, 1)}
    assert marks["faster"][1] != marks["slower"][1]
    (low, _), (high, _) = axes.containers[-1].lines[2][0].get_segments()[0]  # an interval without end is cut off
    assert (low, high) == pytest.approx((0.8 / 1.6, 2 * 1.6))
