"""Run 2: stepscope's rules on a GPU: facts and true gains of the loops in `gpu_loops`, to be replayed anywhere."""

import importlib
import json
import os
import sys

import torch

from helpers import config
from tests.gpu import results
from tests.gpu.measuring import Run

LONGEST_S = 90  # for a loop with its fixed version: a GPU is lent for minutes
NAME = "corpus.jsonl"
"""A line for each loop: ``examine.py --keep FILE`` keeps the loops, ``examine.py --accept`` writes what they say."""


def record(run: Run) -> None:
    """Record each loop that is neither in the folder yet, nor kept for this card."""
    os.environ |= {"EXAMINE_SMALL": str(int(run.small))} | ({} if run.small else {"EXAMINE_LIMIT_S": str(LONGEST_S)})
    sys.path.insert(0, str(config.PROJECT / "stepscope" / "tests" / "examination"))
    examine = importlib.import_module("examine")
    loops = importlib.import_module("gpu_loops").LOOPS
    finished = {line["name"] for line in results.read(run.folder / NAME)}
    kept = examine.RECORDED.glob(f"{examine.in_a_name(torch.cuda.get_device_name())}-*/*.json")
    finished |= {path.stem for path in kept}
    for name in list(loops)[:1] if run.small else loops:
        if name in finished:
            continue

        def measured(name: str = name) -> dict[str, float]:
            found = examine.live(name, truth=True)
            results.append(run.folder / NAME, found)
            said = examine.judged(found)
            print(json.dumps(said), flush=True)
            return {"right": float(said["right"]), "stated": said["stated"], "true": said["true"] or 0.0}

        run.compare("corpus", {name: lambda measured=measured: measured}, rounds=1)
