"""Examines ``stepscope try``: loops and published scripts whose best settings an exhaustive search by hand finds.

    python stepscope/tests/examination/tried.py [--only NAME …] [--accept]
    python stepscope/tests/examination/tried.py --scripts FOLDER [--only NAME …]

For each kind of `tried/loop.py`, all combinations of its settings are timed by hand, in interleaved rounds. Then
``stepscope try`` runs, and the loop as it is, with the recommended settings, and with the best ones by hand are timed
together. With `--scripts` the same is done for published scripts, into which the settings are written; FOLDER is that
of `scripts.py`. Each result goes as a line into `tried/results.jsonl`; `--accept` makes the table in `ACCURACY.md` from
it. Nothing else may run on the machine meanwhile.
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

import scripts
import torch

from stepscope.observe import circumstances

FOLDER = Path(__file__).with_name("tried")
LOOP, RESULTS = FOLDER / "loop.py", FOLDER / "results.jsonl"
ACCURACY = Path(__file__).parents[2] / "ACCURACY.md"
TABLE = re.compile(r"(?<=<!-- tried -->\n).*?(?=<!-- end of tried -->)", re.DOTALL)
SECONDS, ROUNDS, SEARCHED = 2.0, 3, 2  # of a step by hand; rounds of the comparison, and of the search before it
NEAR = 1.05  # times the best step: as good as the best
SLOWER = 1.03  # times the step as it is: slower, beyond the scatter of three rounds
BOTH = (False, True)
BY_HAND = {"workers": (0, 1, 2, 4), "persistent": BOTH, "threads": (1, 2), "fused": BOTH, "bfloat16": BOTH}
MORE_BY_HAND = {"anomaly": BOTH, "channels_last": BOTH}
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


def stopwatch(call: str) -> tuple[str, str]:
    """Return a call in a script, in a line of its own, and the same after a line that prints the time."""
    print_it = "print('seconds=', __import__('time').perf_counter() / len(train_loader), sep='')"
    return f"    {call}\n", f"    {print_it}; {call}\n"


def with_workers(test: str) -> tuple[str, str]:
    """Return a script's settings of its loader, and others; `test` is how it asks for a GPU."""
    usual = f"kwargs = {{'num_workers': 1, 'pin_memory': True}} if {test} else {{}}"
    return usual, "kwargs = {'num_workers': VALUE, 'persistent_workers': True}"


THREADS = ("torch.manual_seed(args.seed)", "torch.manual_seed(args.seed); torch.set_num_threads(VALUE)")
SCRIPTS = {  # what is written into a script for a setting: what it replaces, and by what
    "mnist": {
        "timed": stopwatch("train(args, model, device, train_loader, optimizer, epoch)"),
        "workers": ("train_kwargs = {", "train_kwargs = {'num_workers': VALUE, 'persistent_workers': True, "),
        "threads": THREADS,
        "bfloat16": (
            "output = model(data)", "with torch.autocast('cpu', torch.bfloat16): output = model(data)",
        ),
        "channels_last": ("Net().to(device)", "Net().to(device, memory_format=torch.channels_last)"),
    },
    "mnist_rnn": {
        "timed": stopwatch("train(args, model, device, train_loader, optimizer, epoch)"),
        "workers": with_workers("args.accel"),
        "threads": THREADS,
        "bfloat16": (
            "output = model(data)\n        loss",
            "with torch.autocast('cpu', torch.bfloat16): output = model(data)\n        loss",
        ),
    },
    "vae": {
        "timed": stopwatch("train(epoch)"),
        "workers": with_workers("use_accel"),
        "threads": THREADS,
        "fused": ("lr=1e-3)", "lr=1e-3, fused=True)"),
        "bfloat16": (
            "recon_batch, mu, logvar = model(data)\n        loss",
            "with torch.autocast('cpu', torch.bfloat16): outputs = model(data)\n"
            "        recon_batch, mu, logvar = (each.float() for each in outputs)\n        loss",
        ),
    },
}  # fmt: skip


class Loop:
    """A kind of `tried/loop.py`: its settings as they are, the values to search by hand, and the time of a step."""

    environment, folder, printed = None, None, "step_ms"  # of this process

    def __init__(self, name: str):
        self.name, loop = name, runpy.run_path(str(LOOP))
        self.usual = loop["USUAL"] | {"anomaly": False} | loop["KINDS"][name][3]
        self.usual["threads"] = self.usual["threads"] or torch.get_num_threads()  # one for each core by itself
        self.choices = {setting: (BY_HAND | MORE_BY_HAND)[setting] for setting in TRIED[name]}
        self.command = [LOOP, name]

    def step_ms(self, options: dict) -> float:
        """Return the mean time of a step with these options."""
        arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        return self._run([*self.command, "--seconds", str(SECONDS), *arguments])[-1]

    def _run(self, command: list, folder: Path | None = None) -> list[float]:
        how = {"cwd": folder, "env": self.environment, "capture_output": True, "text": True}
        ended = subprocess.run([sys.executable, *command], check=True, timeout=300, **how)
        return [float(each) for each in re.findall(f"{self.printed}=(.*)", ended.stdout)]


class Published(Loop):
    """A published script: settings and a stopwatch for its epochs are written into it."""

    printed = "seconds"

    def __init__(self, name: str, folder: Path):
        self.name, self.examination = f"{name} in a published script", scripts.Examination(folder, install=False)
        self.edits, self.environment = SCRIPTS[name], self.examination.environment
        self.script = next(each for each in scripts.SCRIPTS if each.name == name)
        self.usual = {"workers": 0, "persistent": False, "threads": torch.get_num_threads()}
        self.usual |= dict.fromkeys(("fused", "bfloat16", "channels_last"), False)
        self.choices = {setting: (BY_HAND | MORE_BY_HAND)[setting] for setting in self.edits if setting != "timed"}
        self.choices["workers"] = (0, 1, 2)
        path = self.examination.placed(self.script)
        self.command, self.folder = [path.name, *self.script.arguments.split(), "--epochs", "20"], path.parent

    def step_ms(self, options: dict) -> float:
        """Return the mean time of a step of the fastest epoch with these options, with its evaluation."""
        if unknown := options.keys() - self.edits.keys() - {"persistent"}:
            raise ValueError(f"SCRIPTS says not what to write into {self.name} for {', '.join(sorted(unknown))}.")
        written = {"timed": ""} | {name: value for name, value in options.items() if name != "persistent"}
        edits = {
            self.edits[name][0]: self.edits[name][1].replace("VALUE", str(value)) for name, value in written.items()
        }
        edited = self.examination.placed(self.script, tuple(edits.items()), " by hand")
        arguments = [*self.script.arguments.split(), "--epochs", "4"]
        began = self._run([edited, *arguments], edited.parent)
        return min(after - before for before, after in itertools.pairwise(began)) * 1e3


def timed(loop: Loop, variants: dict[str, dict], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the shortest mean step of each variant in ms, of some rounds in random order."""
    least = dict.fromkeys(variants, float("inf"))
    for _ in range(rounds):
        for name in random.sample(list(variants), len(variants)):
            least[name] = min(least[name], loop.step_ms(variants[name]))
    return least


def by_hand(loop: Loop) -> dict:
    """Return the options of the fastest combination of a loop's settings."""
    combined = (dict(zip(loop.choices, values, strict=True)) for values in itertools.product(*loop.choices.values()))
    possible = (changed(loop, each) for each in combined if each.get("workers") or not each.get("persistent"))
    variants = {json.dumps(each, sort_keys=True): each for each in possible}
    steps = timed(loop, variants, SEARCHED)
    return variants[min(steps, key=steps.__getitem__)]


def recommended(loop: Loop) -> dict:
    """Return the options that ``stepscope try`` recommends; empty if none."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "tried.json")
        command = [sys.executable, "-m", "stepscope", "try", "--json", found, *loop.command]
        where = {"cwd": loop.folder or folder, "env": loop.environment}
        subprocess.run(command, check=True, capture_output=True, timeout=1200, **where)
        best = json.loads(found.read_text())["recommended"]
    change = best["change"] if best else {}
    names = {"num_workers": "workers", "persistent_workers": "persistent", "autocast": "bfloat16"}
    parts = [(name, value) for part in change.values() for name, value in part.items()]
    return changed(loop, {names.get(name, name): True if name == "autocast" else value for name, value in parts})


def changed(loop: Loop, options: dict) -> dict:
    """Return the options that differ from the loop as it is."""
    return {name: value for name, value in options.items() if value != loop.usual.get(name)}


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
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--scripts", type=Path, metavar="FOLDER")
    parser.add_argument("--accept", action="store_true")
    options = parser.parse_args()
    if options.accept:
        text = table([json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()])
        ACCURACY.write_text(TABLE.sub(lambda _: text, ACCURACY.read_text()))
        return
    machine = circumstances.this_machine()
    names = options.only or list(SCRIPTS if options.scripts else TRIED)
    for each in names:
        loop = Published(each, options.scripts) if options.scripts else Loop(each)
        best, mine = by_hand(loop), recommended(loop)
        different = {json.dumps(each, sort_keys=True): each for each in ({}, mine, best)}
        took = timed(loop, different)
        sides = {"as it is": {}, "recommended": mine, "by hand": best}
        steps = {name: took[json.dumps(each, sort_keys=True)] for name, each in sides.items()}
        name = f"{machine.processor}, {machine.cores} cores"
        result = {"machine": name, "kind": loop.name, "recommended": mine, "by hand": best, "step_ms": steps}
        print(json.dumps(result), flush=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
