"""Runs scripts with faults that people reported in public, faulty and fixed, under ``stepscope run``.

    python stepscope/tests/examination/reported.py [FOLDER] [--only NAME …] [--python PYTHON] [--record]

FOLDER has the scripts, each of which takes ``--fixed``, and ``truth.json``: for each script its lines at fault, or the
`names` by which a finding is right where there is no such line; its true gain; and arguments. Without FOLDER these are
the scripts beside this file. `--python` is an environment with the packages that the scripts import.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import examine

import stepscope
from stepscope.facts import saving

HERE = Path(__file__).with_name("reported")
LIMIT_S = 600


def diagnosed(script: Path, arguments: list[str], python: str) -> dict:
    """Return the result of a script, with diagnosis and facts; raises RuntimeError if there is none."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = Path(folder, "found.json")
        watch = ["-m", "stepscope", "run", "--then", "stop", "--folder", Path(folder, "profile"), "--json", found]
        environment = os.environ | {"PYTHONPATH": str(Path(stepscope.__file__).parents[1])}
        command = [python, *watch, *arguments] if "torchrun" in arguments else [python, *watch, script, *arguments]
        ended = subprocess.run(
            command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        results = json.loads(found.read_text())["results"] if found.exists() else [{}]
    if "facts" not in results[0]:
        raise RuntimeError(f"{script}: {results[0].get('problem')}\n{ended.stderr[-3000:]}")
    return results[0]


def main() -> None:
    """Examine the scripts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=HERE)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    for name, truth in json.loads((options.folder / "truth.json").read_text()).items():
        if options.only is not None and name not in options.only:
            continue
        script = (options.folder / f"{name}.py").absolute()
        for fixed in (False, True):
            kind = f"healthy {truth['set']}" if fixed else truth["set"]
            try:
                found = diagnosed(script, ["--fixed"] * fixed, options.python)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(error, flush=True)
                continue
            record = {
                "name": f"{name}{', fixed' * fixed}",
                "kind": kind,
                "names": truth.get("names", ""),
                "lines": [] if fixed else [f"{script.name}:{line}" for line in truth["lines"]],
                "version": saving.VERSION,
                "facts": found["facts"],
            } | ({} if fixed else {"true": truth["gain"], "address": truth.get("url", "")})
            print(json.dumps(examine.judged({"machine": "here"} | record)), flush=True)
            if options.record:
                examine.keep(record)


if __name__ == "__main__":
    main()
