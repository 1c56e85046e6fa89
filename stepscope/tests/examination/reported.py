"""Runs scripts with faults that people reported in public, faulty and fixed, under ``stepscope run``.

    python stepscope/tests/examination/reported.py [FOLDER] [--only NAME …] [--python PYTHON] [--record | --measure]

FOLDER has the scripts, and ``truth.json``. Without FOLDER these are the scripts in ``reported``, which somebody wrote
after public reports without knowing the rules. A script takes ``--fixed``, its line at fault ends with ``# FAULT``, and
it prints ``step_ms=``, the mean duration of its steps. For each script ``truth.json`` has the true gain, and `names`,
by which a finding is right where no line is at fault; `launch`, the module that starts several ranks; `fixed`,
whether there is a fixed version; and `remaining`, a cost that the fixed version still has: the key of the finding, its
remedy as texts to replace in the script, and its gain. `--python` is an environment with the packages that the scripts
import. `--measure` measures the true gains, with a part of the steps, and `--record` keeps the facts beside those of
`examine`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import examine

import stepscope
from stepscope.facts import saving

HERE = Path(__file__).with_name("reported")
MARK = "# FAULT"
LIMIT_S = 600
ROUNDS = 2
STEPS = re.compile(r'"--steps", type=int, default=(\d+)')
PART, LEAST = 4, 60  # a quarter of the steps is timed, but at least so many
TIME = re.compile(r"^(?:step_ms=|MEAN_MS )([\d.]+)", re.MULTILINE)
KEPT = ("facts", "job")


def diagnosed(script: Path, fixed: bool, python: str, launch: list[str]) -> dict:
    """Return the facts of a script, and of its ranks together if there are several; raises RuntimeError without."""
    environment = os.environ | {"PYTHONPATH": str(Path(stepscope.__file__).parents[1])}
    command = [*launch, script, *["--fixed"] * fixed]
    results = examine.watched(python, command, env=environment, cwd=_folder(), timeout=LIMIT_S)
    return {name: value for result in (results[0], results[-1]) for name, value in result.items() if name in KEPT}


def measured(script: Path, python: str, launch: list[str]) -> dict:
    """Return the true gain of a script by its shortest steps, and the scatter of the rounds.

    Raises RuntimeError if a script prints no step time.
    """
    return compared([python, *launch, script], [python, *launch, script, "--fixed"], script)


def measured_remaining(script: Path, python: str, launch: list[str], replace: list[list[str]]) -> dict:
    """Return the gain of a second remedy, which replaces texts in the fixed version of a script."""
    text = script.read_text()
    for old, new in replace:
        assert old in text, f"{script}: expected {old!r}"
        text = text.replace(old, new, 1)
    with tempfile.TemporaryDirectory() as folder:
        remedied = Path(folder, script.name)
        remedied.write_text(text)
        return compared([python, *launch, script, "--fixed"], [python, *launch, remedied, "--fixed"], script)


def compared(slow: list, fast: list, script: Path) -> dict:
    """Return the gain of one command over another by their shortest steps, and the scatter of the rounds."""
    rounds, known = [], STEPS.search(script.read_text())
    steps = ["--steps", str(max(LEAST, int(known[1]) // PART))] if known else []
    for _ in range(ROUNDS):
        ended = [
            subprocess.run([*command, *steps], cwd=_folder(), capture_output=True, text=True, timeout=LIMIT_S)
            for command in (slow, fast)
        ]
        times = [TIME.findall(each.stdout) for each in ended]
        if not all(times):
            raise RuntimeError(f"{script}: expected step_ms=…, found {[each.stderr[-2000:] for each in ended]}")
        rounds.append([float(each[-1]) for each in times])
    found = examine.gain_of(rounds)
    return {"gain": found["true"], "scatter": found["scatter"], "measured": f"wall time, {ROUNDS} rounds"}


def _folder() -> Path:
    """Return the folder for the files of the scripts, in the folder for temporary files."""
    folder = Path(tempfile.gettempdir(), "stepscope-reported")
    (folder / "case-data").mkdir(parents=True, exist_ok=True)
    return folder


def main() -> None:
    """Examine the scripts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=HERE)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    file = options.folder / "truth.json"
    truths = json.loads(file.read_text())
    for name, truth in truths.items():
        if options.only is not None and name not in options.only:
            continue
        script = (options.folder / f"{name}.py").absolute()
        try:
            versions, launch = (False, True) if truth.get("fixed", True) else (False,), truth.get("launch", [])
            if options.measure:
                truth |= measured(script, options.python, launch) if len(versions) > 1 else {}
                if remaining := truth.get("remaining"):
                    remaining |= measured_remaining(script, options.python, launch, remaining["replace"])
                file.write_text(json.dumps(truths, indent=1, ensure_ascii=False) + "\n")
                print(name, *(each.get("gain") for each in (truth, truth.get("remaining", {}))), flush=True)
                continue
            for fixed in versions:
                facts = diagnosed(script, fixed, options.python, launch)
                record = record_of(name, script, fixed, truth, facts)
                print(json.dumps(examine.judged({"machine": "here"} | record)), flush=True)
                if options.record:
                    examine.keep(record)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(error, flush=True)


def record_of(name: str, script: Path, fixed: bool, truth: dict, facts: dict) -> dict:
    """Return the record of a script, as `examine` keeps it; a fixed script is healthy."""
    lines = truth.get("lines")
    if lines is None:
        lines = [number for number, text in enumerate(script.read_text().splitlines(), 1) if MARK in text]
    record = {
        "name": f"{name}{', fixed' * fixed}",
        "kind": f"{'healthy ' * fixed}{truth['set'].removeprefix('healthy ' * fixed)}",
        "names": truth["names"],
        "lines": [] if fixed else [f"{script.name}:{line}" for line in lines],
    }
    known = {} if fixed else {"true": truth["gain"], "scatter": truth.get("scatter"), "address": truth["address"]}
    return record | known | {"version": saving.VERSION} | facts


if __name__ == "__main__":
    main()
