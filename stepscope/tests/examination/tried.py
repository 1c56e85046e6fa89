"""Examines ``stepscope try``: loops whose best settings are known by an exhaustive search by hand.

    python stepscope/tests/examination/tried.py [--only KIND …] [--accept]

For each kind of `tried/loop.py`, all combinations of its settings are timed by hand, in interleaved rounds. Then
``stepscope try`` runs, and the loop as it is, with the recommended settings, and with the best ones by hand are timed
together. Each result goes as a line into `tried/results.jsonl`; `--accept` makes the table in `ACCURACY.md` from it.
Nothing else may run on the machine meanwhile.
"""

import argparse
import itertools
import json
import random
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from stepscope.observe import circumstances

FOLDER = Path(__file__).with_name("tried")
LOOP, RESULTS = FOLDER / "loop.py", FOLDER / "results.jsonl"
ACCURACY = Path(__file__).parents[2] / "ACCURACY.md"
TABLE = re.compile(r"(?<=<!-- tried -->\n).*?(?=<!-- end of tried -->)", re.DOTALL)
SECONDS, ROUNDS = 2.0, 3
NEAR = 1.05  # times the best step: as good as the best
SLOWER = 1.03  # times the step as it is: slower, beyond the scatter of three rounds
BOTH = (False, True)
BY_HAND = {"workers": (0, 1, 2, 4), "persistent": BOTH, "threads": (1, 2), "fused": BOTH, "bfloat16": BOTH}
TRIED = {  # settings of each kind that may matter; the others stay as they are
    "items that wait": ("workers", "persistent"),
    "items that work": ("workers", "persistent"),
    "workers without work": ("workers", "persistent", "threads"),
    "short epochs": ("workers", "persistent"),
    "anomaly detection": ("anomaly", "fused", "threads"),
    "one thread": ("threads", "workers", "channels_last"),
    "a loop of updates": ("fused", "threads", "bfloat16"),
    "wide layers": ("bfloat16", "fused", "threads"),
    "items that wait, one thread": ("workers", "threads"),
    "workers and updates": ("workers", "fused", "threads"),
    "healthy: a busy GPU": ("workers", "threads", "fused"),
    "healthy: well fed": ("workers", "threads", "fused"),
}


def timed(kind: str, variants: dict[str, dict]) -> dict[str, float]:
    """Return the shortest mean step of each variant in ms, of some rounds in random order."""
    least = dict.fromkeys(variants, float("inf"))
    for _ in range(ROUNDS):
        for name in random.sample(list(variants), len(variants)):
            options = [text for key, value in variants[name].items() for text in (f"--{key}", str(value))]
            command = [sys.executable, LOOP, kind, "--seconds", str(SECONDS), *options]
            ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
            least[name] = min(least[name], float(re.search("step_ms=(.*)", ended.stdout)[1]))
    return least


def by_hand(kind: str) -> dict:
    """Return the options of the fastest combination of a kind's settings."""
    choices = BY_HAND | {"anomaly": BOTH, "channels_last": BOTH}
    names = TRIED[kind]
    combined = (
        dict(zip(names, values, strict=True)) for values in itertools.product(*(choices[name] for name in names))
    )
    variants = {json.dumps(each): each for each in combined if each.get("workers") or not each.get("persistent")}
    steps = timed(kind, variants)
    return changed(kind, variants[min(steps, key=steps.__getitem__)])


def recommended(kind: str) -> dict:
    """Return the options that ``stepscope try`` recommends; empty if none."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "tried.json")
        command = [sys.executable, "-m", "stepscope", "try", "--json", found, LOOP, kind]
        subprocess.run(command, check=True, cwd=folder, capture_output=True, timeout=1200)
        best = json.loads(found.read_text())["recommended"]
    change = best["change"] if best else {}
    names = {"num_workers": "workers", "persistent_workers": "persistent", "autocast": "bfloat16"}
    parts = [(name, value) for part in change.values() for name, value in part.items()]
    return changed(kind, {names.get(name, name): True if name == "autocast" else value for name, value in parts})


def changed(kind: str, options: dict) -> dict:
    """Return the options that differ from the loop as it is: PyTorch has a thread for each core by itself."""
    loop = runpy.run_path(str(LOOP))
    as_it_is = loop["USUAL"] | {"anomaly": False} | loop["KINDS"][kind][3]
    as_it_is["threads"] = as_it_is["threads"] or torch.get_num_threads()
    return {name: value for name, value in options.items() if value != as_it_is.get(name)}


def table(results: list[dict]) -> str:
    """Return the results as a table in Markdown."""
    rows = ["| loop | recommended | by hand | as it is ÷ recommended | recommended ÷ by hand | right |"]
    rows.append("|---|---|---|---:|---:|---|")
    for each in results:
        usual, mine, best = (each["step_ms"][name] for name in ("as it is", "recommended", "by hand"))
        right = mine <= NEAR * best and mine <= SLOWER * usual
        said = [", ".join(f"{key}={value}" for key, value in each[name].items()) for name in ("recommended", "by hand")]
        rows.append(
            f"| {each['kind']} | {said[0] or 'nothing'} | {said[1]} | {usual / mine:.2f}× | {mine / best:.2f} | "
            f"{'yes' if right else '**no**'} |"
        )
    machines = ", ".join(dict.fromkeys(each["machine"] for each in results))
    return "\n".join([f"Measured on {machines}.", "", *rows, ""])


def main() -> None:
    """Examine each kind, and append its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(TRIED))
    parser.add_argument("--accept", action="store_true")
    options = parser.parse_args()
    if options.accept:
        text = table([json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()])
        ACCURACY.write_text(TABLE.sub(lambda _: text, ACCURACY.read_text()))
        return
    machine = circumstances.this_machine()
    for kind in options.only:
        best, mine = by_hand(kind), recommended(kind)
        different = {json.dumps(each, sort_keys=True): each for each in ({}, mine, best)}
        took = timed(kind, different)
        sides = {"as it is": {}, "recommended": mine, "by hand": best}
        steps = {name: took[json.dumps(each, sort_keys=True)] for name, each in sides.items()}
        name = f"{machine.processor}, {machine.cores} cores"
        result = {"machine": name, "kind": kind, "recommended": mine, "by hand": best, "step_ms": steps}
        print(json.dumps(result), flush=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
