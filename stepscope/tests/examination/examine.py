"""The examination: facts of loops with a known truth, recorded once on each kind of machine, judged by today's rules.

    examine.py [--set THRESHOLD=VALUE …]        print each loop whose first finding, or gain, a threshold changes
    examine.py --accept                         write the tables in ACCURACY.md anew
    examine.py --record [NAME or KIND …]        run loops here: measure their true gains, and record their facts
    examine.py --keep FILE                      keep records that ``python -m tests.gpu 2`` wrote on a GPU
    examine.py --live NAME … [--busy N]         run loops here, diagnose them, and judge; N processes keep a core busy

A gain is the share of the faulty step that the fixed one saves, measured with nothing else running. Where a GPU is, the
loops are those of `gpu_loops`, else those of `loops`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from stepscope import thresholds

RECORDED = Path(__file__).with_name("recorded")  # a folder for each kind of machine, a file for each loop
ACCURACY = Path(__file__).parents[2] / "ACCURACY.md"
TABLES = re.compile(r"(?<=<!-- examination -->\n).*(?=<!-- end -->)", re.DOTALL)
NARROW = 1.6  # factor between the ends of a narrow range of speedups
REPORTED = ("reported", "public cases")  # kinds of faults in scripts that somebody wrote after a report
AS_IT_IS = "as it is"  # instead of a fault in a script's name
Record = dict[str, Any]


def recorded() -> Iterator[Record]:
    """Yield all recorded loops."""
    for file in sorted(RECORDED.glob("*/*.json")):
        yield {"machine": file.parent.name} | json.loads(file.read_text())


def judged(record: Record) -> Record:
    """Return what today's rules say of a recorded loop, and whether that is right: nothing, if the loop is healthy.

    A healthy script may have a cost that its report does not mention, if a second remedy has shown the gain. In a
    script with a planted fault, the script's own fault ("as it is") may come first. The marked lines of a reported
    fault may only define what is slow elsewhere: there the name or the change of the finding may name the cause.
    """
    from stepscope.rules.conclusion import sure  # here, since rules read some thresholds when they are imported

    diagnosis = _diagnosis(record)
    found = [each for each in diagnosis.findings if each.gain >= thresholds.WORTH]
    unexplained = [each for each in found if each.key != _remaining().get(record["name"])]
    fault, _, script = record["name"].partition(", ")
    if script and fault != AS_IT_IS:
        found = [each for each in found if each.key != _own_faults().get((record["machine"], script))] or found
    lines, line, named = set(record["lines"]), False, False
    for each in found[:1]:
        line = bool(lines & set(re.findall(r"\w+\.py:\d+", each.evidence)))
        cause = f"{each.name} {each.change} {each.line}" + f" {each.evidence}" * (not lines)
        cause = cause.replace(record["name"], "")  # a script's name may contain the name of its fault
        may_be_named = not lines or record["kind"] in REPORTED
        named = line or (may_be_named and bool(re.search(record["names"], cause, re.IGNORECASE)))
    return {
        "machine": record["machine"],
        "name": record["name"],
        "kind": record["kind"],
        "verdict": diagnosis.verdict,
        "right": not any(map(sure, unexplained)) if record["kind"].startswith("healthy") else named,
        "key": found[0].key if found else "",
        "line": line if lines else None,  # None if no line of the loop is at fault
        "stated": found[0].gain if found else 0.0,
        "range": (found[0].range or (0.0, found[0].gain)) if found else None,
        "true": record.get("true"),
        "scatter": record.get("scatter"),
    }


def _diagnosis(record: Record) -> Any:
    from stepscope import rules
    from stepscope.facts import saving

    name = "job" if "job" in record else "facts"  # of all ranks, or of one process
    return rules.diagnose(saving.of_json({"version": record["version"], name: record[name]}))


@cache
def _own_faults() -> dict[tuple[str, str], str]:
    """Return the key of the first finding of each unedited script that has a fault of its own."""
    found = {}
    for record in recorded():
        fault, _, script = record["name"].partition(", ")
        if fault == AS_IT_IS:
            found[record["machine"], script] = _diagnosis(record).findings[0].key
    return found


@cache
def _remaining() -> dict[str, str]:
    """Return for remedied scripts the key of a cost that they still have, measured by a second remedy."""
    truths = json.loads(Path(__file__).with_name("reported").joinpath("truth.json").read_text(encoding="utf-8"))
    costs = {f"{name}, fixed": truth["remaining"] for name, truth in truths.items() if "remaining" in truth}
    return {name: cost["key"] for name, cost in costs.items() if cost["gain"] >= thresholds.WORTH}


def _times(gain: float) -> float:
    """Return how many times as fast a step is without a share of its time; 100 at most."""
    return 1 / max(1 - gain, 0.01)


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether the numbers between the extremes of two sequences have one in common."""
    return min(one) <= max(other) and min(other) <= max(one)


def tables(rows: Iterable[Record]) -> str:
    """Return the tables of ACCURACY.md: for each machine the kinds of loops, then the loops."""
    rows, parts = list(rows), []
    for machine in dict.fromkeys(row["machine"] for row in rows):
        here = [row for row in rows if row["machine"] == machine]
        parts += [
            f"### {machine}\n",
            "| fault in | loops | right | its line | true gain in the range | or its scatter is | narrow ranges |",
        ]
        parts.append("|---|---:|---:|---:|---:|---:|---:|")
        kinds = {kind: [row for row in here if row["kind"] == kind] for kind in dict.fromkeys(r["kind"] for r in here)}
        for kind, some in [*kinds.items(), ("all", here)]:
            lines = [row["line"] for row in some if row["line"] is not None]
            known = [row for row in some if row["true"] is not None and row["range"]]
            holds = sum(_overlap(row["range"], [row["true"]]) for row in known)
            touched = sum(_overlap(row["range"], [row["true"], *(row["scatter"] or ())]) for row in known)
            narrow = sum(_times(row["range"][1]) <= NARROW * _times(row["range"][0]) for row in known)
            right = sum(row["right"] for row in some)
            gains = [f"{count} of {len(known)}" if known else "" for count in (holds, touched, narrow)]
            parts.append(f"| {kind} | {len(some)} | {right} | {sum(lines)} of {len(lines)} | {' | '.join(gains)} |")
        parts += ["", "| loop | first finding | its line | times as fast: stated (range), true | right |"]
        parts.append("|---|---|---|---:|---|")
        for row in here:
            line = {True: "yes", False: "no", None: ""}[row["line"]]
            true = "" if row["true"] is None else f"{_times(row['true']):.2f}"
            gain = ", ".join(filter(None, [_stated(row), true]))
            found = f"`{row['key']}`" if row["key"] else row["verdict"]
            parts.append(f"| {row['name']} | {found} | {line} | {gain} | {'yes' if row['right'] else '**no**'} |")
        parts.append("")
    return "\n".join(parts)


def loops_here() -> Any:
    """Return the module of the loops that this machine can run: `gpu_loops` where a GPU is, else `loops`."""
    import torch

    return importlib.import_module("gpu_loops" if torch.cuda.is_available() else "loops")


def child(parts: Sequence[str], name: str) -> Record:
    """Return parts of a loop's record, measured in this process: its "facts", its "truth"."""
    module, record = loops_here(), {}
    module.write_files()
    loop = module.LOOPS[name]
    if "facts" in parts:
        from stepscope.facts import saving
        from stepscope.observe.loop import observe

        facts = saving.as_json(observe(*loop.make(False), module.STEPS, Path("diagnosis")))
        record |= {"version": saving.VERSION, **facts}
    if "truth" in parts:
        rounds = [[module.mean_step(*loop.make(fixed)) for fixed in (False, True)] for _ in range(module.ROUNDS)]
        record |= gain_of(rounds)
    return record


def gain_of(rounds: Sequence[Sequence[float]]) -> Record:
    """Return the gain of a fixed step by the shortest times, and its scatter; a round has the faulty step's time first.

    The shortest times count, since other work of the machine can only add to a time.
    """
    wrong, right = (min(times) for times in zip(*rounds, strict=True))
    each = [1 - right / wrong for wrong, right in rounds]
    return {"true": 1 - right / wrong, "scatter": [min(each), max(each)]}


def watched(python: str, command: Sequence[Any], **options: Any) -> list[Record]:
    """Return the results of a script under ``stepscope run``; raises RuntimeError if the first result has no facts.

    `options` are for `subprocess.run`.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = Path(folder, "found.json")
        watch = ["-m", "stepscope", "run", "--then", "stop", "--folder", Path(folder, "profile"), "--json", found]
        ended = subprocess.run([python, *watch, *command], capture_output=True, text=True, **options)
        results: list[Record] = json.loads(found.read_text())["results"] if found.exists() else [{}]
    if "facts" not in results[0]:
        raise RuntimeError(f"{command}: {results[0].get('problem')}\n{ended.stderr[-3000:]}")
    return results


def in_own_process(parts: Sequence[str], name: str, busy: int = 0) -> Record:
    """Return what `child` returns in a process of its own, beside busy ones; raises RuntimeError if it fails."""
    # Two threads on one core that wait by spinning, as OpenMP's do, stop each other for 0.2 s in each step
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("OMP_NUM_THREADS", None)  # of a test: one thread would be a fault
    limit = os.environ.get("EXAMINE_LIMIT_S", "600")
    command = ["timeout", "-s", "KILL", limit, sys.executable, str(Path(__file__).absolute()), name, "--child", *parts]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        for _ in range(busy):
            stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        return json.loads(Path(folder, "result.json").read_text())


def live(name: str, truth: bool, busy: int = 0) -> Record:
    """Run a loop here and return its record."""
    module = loops_here()
    loop = module.LOOPS[name]
    source, number = inspect.getsourcelines(loop.source)
    lines = [f"{module.__name__}.py:{number + i}" for i, line in enumerate(source) if "# FAULT" in line]
    record = {"machine": "here", "name": name, "kind": loop.kind, "names": loop.names, "lines": lines}
    parts = ["facts", "truth"] if truth and not loop.kind.startswith("healthy") else ["facts"]
    # In a process for each part: but on a GPU, where time is short, in one, which is 20 s quicker
    for some in [parts] if module.__name__ == "gpu_loops" else [[part] for part in parts]:
        record |= in_own_process(some, name, busy)
    return record


def in_a_name(text: str) -> str:
    """Return a text as it stands in the name of a folder."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def keep(record: Record) -> None:
    """Write a record into the folder of its kind of machine, such as "AMD-EPYC-2-cores"."""
    machine = record["facts"]["machine"]
    kind = machine["processor"] if machine["device"] == "CPU" else machine["device"]
    folder = RECORDED / in_a_name(f"{kind} {machine['cores']} cores")
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in record.items() if key != "machine"}
    name = re.sub(r"[^A-Za-z0-9]+", "_", record["name"]).strip("_")
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*", metavar="NAME or KIND")
    parser.add_argument("--set", nargs="*", default=[], metavar="THRESHOLD=VALUE", dest="changed")
    parser.add_argument("--accept", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--busy", type=int, default=0, metavar="N")
    parser.add_argument("--keep", type=Path, metavar="FILE")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        Path("result.json").write_text(json.dumps(child(options.child, options.loops[0])))
    elif options.keep:
        for line in options.keep.read_text(encoding="utf-8").splitlines():
            keep(json.loads(line))
    elif options.record or options.live:
        wanted, loops = set(options.loops), loops_here().LOOPS
        for name in (name for name, loop in loops.items() if not wanted or {name, loop.kind} & wanted):
            try:
                record = live(name, options.record, options.busy)
            except RuntimeError as error:
                print(error, flush=True)
                continue
            if options.record:
                keep(record)
            print(json.dumps(judged(record)), flush=True)
    elif options.accept:
        text = tables(map(judged, recorded()))
        ACCURACY.write_text(TABLES.sub(lambda _: text, ACCURACY.read_text()))
    else:
        # In a process of its own, since rules read some thresholds when they are imported
        before = {(row["machine"], row["name"]): row for row in _in_child([])}
        for row in _in_child(options.changed):
            was = before[row["machine"], row["name"]]
            if was != row or not options.changed:
                print(f"{row['machine']} {row['name']}: {_said(was)}{f' -> {_said(row)}' if was != row else ''}")


def _in_child(changed: list[str]) -> list[Record]:
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from stepscope import thresholds\n"
        "for each in sys.argv[2:]: name, _, value = each.partition('='); getattr(thresholds, name); "
        "setattr(thresholds, name, float(value))\n"
        "import examine; print(json.dumps([*map(examine.judged, examine.recorded())]))"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), *changed]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _said(row: Record) -> str:
    return f"{row['key'] or row['verdict']} {_stated(row)}{'' if row['right'] else ' (wrong)'}"


def _stated(row: Record) -> str:
    if not row["range"]:
        return ""
    least, most = map(_times, row["range"])
    return f"{_times(row['stated']):.2f} ({least:.2f} to {most:.2f})"


if __name__ == "__main__":
    main()
