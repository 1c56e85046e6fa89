"""Figures for a teacher's slides, drawn from the course's own data, from simulations, and from your own runs.

Nothing is measured for them. ``python -m helpers slides --out DIR`` writes them.
"""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

from helpers import config, simulate
from helpers.figures.data_parallel import communication, scaling
from helpers.figures.drawing import Picture
from helpers.figures.ladders import ladder
from helpers.figures.networks import memory_formats, number_formats
from helpers.figures.profiles import breakdown, utilization_and_efficiency
from helpers.figures.timings import run_ahead, time_lines
from helpers.results import scoreboard, tour
from stepscope import traces
from stepscope.base import staging
from stepscope.base.wording import counted

WIDTH, HEIGHT, TITLE = 1920, 1080, 84  # pixels
SMALLEST = 8.5  # inches of width: then letters of 8 to 10 points are 25 to 31 pixels high
PAGE = "README.md"
Slide = tuple[str, str, Picture]  # its title, what to say, and the figure

# What to say about two recorded traces side by side
PAIRS = {
    "Which part of a step became shorter with more workers, and which did not? Why?": (
        "01 naive PNG files",
        "03 more workers",
    ),
    "One file of pixels instead of many small files. How much waiting is left, and what would help now?": (
        "04 normalize on the device",
        "06 packed in one file",
    ),
    "Photos: resized once instead of in each epoch. What is the price (disk, and the choice of sizes)?": (
        "05 photos as they are",
        "05 photos resized ahead",
    ),
    "A real network. Does anything wait for data? What can be gained?": ("09 ResNet-50", "11 mixed precision"),
}

PARTS = ("01", "04"), ("05", "07"), ("09", "12"), ("14", "18")  # of the ladder: notebooks that share a slide


def write(folder: str | Path) -> str:
    """Draw all slides, and write a page with their alternative texts and notes; return a line that says so.

    Other files in `folder` stay.
    """
    folder = Path(folder).resolve()
    text = "# Slides\n\nEach figure names what it was recorded on, or says that it is simulated.\n"
    for number, (title, say, picture) in enumerate(_slides(), 1):
        name = f"{number:02}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.png"
        _save(picture, title, folder / name)
        alt = picture.alt.replace("[", "(").replace("]", ")")
        text += f"\n## {number} {title}\n\n{say}\n\n![{alt}]({name})\n"
    staging.write(folder / PAGE, text)
    return f"{counted(number, 'slide')} are in {folder}; the notes for each are in {PAGE} there."


def _save(picture: Picture, title: str, path: Path) -> None:
    """Write a figure below its title: inside the figure, the title would cover a legend above the panels."""
    figure, height = picture.figure, HEIGHT - TITLE
    width = max(SMALLEST, figure.get_figwidth(), figure.get_figheight() * WIDTH / height)
    figure.set_size_inches(width, width * height / WIDTH)
    slide = Image.new("RGB", (WIDTH, HEIGHT), "white")
    slide.paste(Image.open(io.BytesIO(picture.png(WIDTH / width))), (0, TITLE))
    font = ImageFont.truetype(findfont("DejaVu Sans:bold"), TITLE // 2)
    ImageDraw.Draw(slide).text((WIDTH / 2, TITLE / 2), title, "black", font, anchor="mm")
    buffer = io.BytesIO()
    slide.save(buffer, "png")
    staging.write(path, buffer.getvalue())


def _slides() -> Iterator[Slide]:
    boards = sorted(scoreboard.REFERENCE.glob("*/scoreboard.jsonl"))
    for board in boards:
        yield from _ladders(f"recorded on {board.parent.name}", scoreboard.ladder(board))
    yield from _ladders("measured on this machine", scoreboard.ladder())
    for board in boards:
        yield from _pairs(board)
    machine = dict(re.findall(r"^\| (\w+) \| (.*) \|$", (tour.FOLDER / tour.PAGE).read_text(encoding="utf-8"), re.M))
    recorded = f"recorded on {machine['device']}, {machine['processor']}, {machine['cores']} cores"
    said = "Three training steps, then three evaluation steps without a backward pass. Ask: which is which?"
    yield "Six steps of the guided tour", said, breakdown({"tour": traces.breakdown(tour.FOLDER)}, recorded)
    said = "Kernels run for 80% of these 10 ms. Is the GPU used well? Mostly nine tenths of it have no work."
    kernels = [(0.0, 6.0, 0.1), (8.0, 10.0, 1.0)]
    yield "Utilization is not efficiency", said, utilization_and_efficiency(kernels, "an example, not measured")
    image = torch.zeros(1, 3, 2, 4)
    formats = {"contiguous, NCHW": image, "channels_last, NHWC": image.contiguous(memory_format=torch.channels_last)}
    said = (
        "The same image, twice. Where are the three numbers of its first pixel? Which does a convolution read together?"
    )
    yield "Memory formats", said, memory_formats(formats)
    said = "Which bits does bfloat16 give up, and which float16? Which of the two needs a loss scale?"
    yield "Number formats", said, number_formats()

    # The time lines of notebooks 08 and 12, and a prediction for 16, all calculated

    def run(steps: int = 100, **dials) -> simulate.SimulatedRun:
        return simulate.SimulatedDevice(**({"kernels": 8, "launch_us": 10} | dials)).run(steps)

    said = "Above, kernels twice as fast would gain nothing. Below, the host is ahead, and waits only when it asks."
    runs = {"launch-bound": run(kernel_us=4), "GPU-bound": run(kernel_us=20)}
    yield "Launch-bound and GPU-bound", said, time_lines(runs)
    said = "One print(loss) a step. What does it cost, and where would it cost nothing?"
    runs = {
        "reads no loss": run(kernel_us=15, loading_us=40),
        "reads each loss": run(kernel_us=15, loading_us=40, asks=True),
    }
    yield "The host asks for the loss", said, time_lines(runs)
    said = "How far the host is ahead of the GPU. A stopwatch without synchronize() measures the host only."
    ends = {"reads no loss": run(20, kernel_us=20).ends, "reads each loss": run(20, kernel_us=20, asks=True).ends}
    yield "The host runs ahead", said, run_ahead(ends, "simulated host and GPU")
    said = "The copy of the next batch overlaps this step's kernels. The gain is at most the shorter of the two."
    runs = {counted(streams, "stream"): run(kernel_us=20, copy_us=100, streams=streams) for streams in (1, 2)}
    yield "Copies on a stream of their own", said, time_lines(runs, steps=3)
    said = "Sixteen launches, or one. The kernels are the same."
    runs = {"launched one by one": run(kernels=16, kernel_us=3), "one graph": run(kernels=16, kernel_us=3, graph=True)}
    yield "A CUDA graph", said, time_lines(runs, steps=2)
    network, rows = simulate.SlowNetwork(mb_per_s=625, latency_ms=0.02), []
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        exchange = 1e3 * network.seconds(100e6, ranks)
        for kind, step in (("after backward", 300 + exchange), ("during backward", 100 + max(200, exchange))):
            rows.append({"kind": kind, "ranks": ranks, "images/s": None, "predicted": 32e3 * ranks / step})
    table = pd.DataFrame(rows).astype({"images/s": float})
    said = "Change one number: what happens with a tenth of the bandwidth? What does no calculation know?"
    source = f"calculated, nothing ran: 100 ms forward, 200 ms backward, 32 images a rank, 100 MB, {network}"
    yield "What more ranks could bring", said, scaling(table, source)

    troubled = {
        name: config.runs_dir() / "17-stragglers-and-failures" / name for name in ("even", "straggler", "buffers")
    }
    troubled = {name: traces.communication(path) for name, path in troubled.items() if path.is_dir()}
    if troubled:
        said = (
            "Your own run of notebook 17. Which rank is late with a straggler? "
            "The one with the least exposed communication."
        )
        yield "Who waits for whom", said, communication(troubled, "sleeping layers, simulated network, this machine")


def _ladders(where: str, results: list[scoreboard.Result]) -> Iterator[Slide]:
    """Yield a slide for each part of a ladder that has a ratio; a slide has no room for all rungs."""
    for first, last in PARTS:
        part = [result for result in results if first <= result.rung[:2] <= last]
        if any(result.ratio for result in part):
            rungs = " to ".join(dict.fromkeys(result.rung[:2] for result in (part[0], part[-1])))
            said = "Let the class guess the next pair before you show it. Which ratio did they expect, and why?"
            yield f"The ladder, {rungs}, {where}", said, ladder(part)


def _pairs(board: Path) -> Iterator[Slide]:
    results = {result.rung: result for result in scoreboard.read(board)}
    for said, pair in PAIRS.items():
        folders = {rung: board.parent / scoreboard.trace_folder(rung) for rung in pair if rung in results}
        if len(folders) == len(pair) and all(path.is_dir() for path in folders.values()):
            result = results[pair[0]]
            source = f"recorded on {board.parent.name}: {result.device}, {result.step}, {result.data}"
            tables = {rung: traces.breakdown(path) for rung, path in folders.items()}
            yield f"Where a step's time goes: {pair[1]}", said, breakdown(tables, source)
