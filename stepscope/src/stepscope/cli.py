"""The command ``stepscope run · try · diagnose · compare · page · rules · traces · tensorboard``."""

import argparse
import io
import json
import math
import os
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from stepscope.base import terminal
from stepscope.base.wording import printable


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 1 if there is a problem."""
    parser = argparse.ArgumentParser(prog="stepscope", description="Find the bottleneck of a PyTorch training loop.")
    parser.add_argument("--version", action="version", version=f"stepscope {metadata.version('stepscope')}")
    commands = parser.add_subparsers(required=True)
    script = commands.add_parser(
        "run",
        help="run an unedited training script and find its bottleneck",
        usage="stepscope run [options] SCRIPT ARGUMENTS …  or  stepscope run [options] -m MODULE ARGUMENTS …",
    )
    script.add_argument(
        "--steps",
        type=_count,
        default=20,
        metavar="N",
        help="steps to time (default: 20), fewer if they take more than 1.5 s; about 40 further steps are needed, and "
        "more with workers",
    )
    script.add_argument(
        "--then", choices=["stop", "continue"], default="continue", help="the script's action after the diagnosis"
    )
    script.add_argument(
        "--folder", type=Path, default="diagnosis", help="folder for the profile and the facts (default: diagnosis)"
    )
    _add_script(script)
    script.set_defaults(command=_run, refuse=script.error)
    attempt = commands.add_parser(
        "try",
        help="try settings in an unedited training script, and measure what each gains",
        usage="stepscope try [options] SCRIPT ARGUMENTS …  or  stepscope try [options] -m MODULE ARGUMENTS …",
    )
    attempt.add_argument("--settings", metavar="NAME,…", help="groups of settings (default: all that may help)")
    attempt.add_argument("--rounds", type=_count, metavar="N", help="deciding rounds, at most (default: 12)")
    attempt.add_argument(
        "--minutes", type=_minutes, default=15.0, metavar="N", help="end after N minutes (default: 15)"
    )
    attempt.add_argument("--steps", type=_count, metavar="N", help="steps to time in each run (default: 3 s of steps)")
    attempt.add_argument(
        "--in-copy",
        action=argparse.BooleanOptionalAction,
        help="run in a copy of the current folder (default: if it has less than 200 MB)",
    )
    _add_script(attempt)
    attempt.set_defaults(command=_try, refuse=attempt.error)
    traces = commands.add_parser("traces", help="print traces as tables: steps, loading, accelerators, kernels, gaps")
    traces.add_argument("path", metavar="PATH", help="a trace, the folder of a run, or a folder of runs")
    traces.set_defaults(command=_traces)
    diagnose = commands.add_parser(
        "diagnose", help="find the bottleneck in each trace or file of facts, and suggest changes"
    )
    diagnose.add_argument(
        "path", metavar="TRACE_OR_LOGDIR", help="a trace, a file of facts, the folder of a run, or a folder of runs"
    )
    diagnose.add_argument("--json", action="store_true", help="print the results as JSON")
    diagnose.set_defaults(command=_diagnose)
    compare = commands.add_parser("compare", help="compare the duration of steps before and after a change")
    for side in ("before", "after"):
        compare.add_argument(
            side, metavar=side.upper(), help="a file of `stepscope run --json`, or a folder of files of several runs"
        )
    compare.add_argument(
        "--fail-above", type=_share, metavar="PERCENT", help="exit with 1 if steps surely take longer by more than this"
    )
    compare.set_defaults(command=_compare)
    page = commands.add_parser("page", help="write the results as a self-contained page of HTML")
    page.add_argument("found", metavar="FOUND.json", type=Path, help="a file from run, try or diagnose --json")
    page.add_argument("page", metavar="PAGE.html", type=Path, nargs="?", help="default: FOUND.html")
    page.set_defaults(command=_page)
    rules = commands.add_parser("rules", help="list all findings: key, name, when it applies, and the change")
    rules.set_defaults(command=_rules)
    tensorboard = commands.add_parser("tensorboard", help="show traces in the corrected profiler tab")
    logdir = tensorboard.add_mutually_exclusive_group(required=True)
    logdir.add_argument("logdir", metavar="LOGDIR", nargs="?", help="folder of the traces")
    fixed = "instead write corrected copies of the traces into the folder OUT, for a plain TensorBoard"
    logdir.add_argument("--fix", metavar=("LOGDIR", "OUT"), nargs=2, help=fixed)
    tensorboard.set_defaults(command=_tensorboard)
    options = parser.parse_args(arguments)
    return execute(options.command, options, "stepscope")


def execute(command: Callable[[argparse.Namespace], int], options: argparse.Namespace, package: str) -> int:
    """Run a command with its options and return its exit status.

    Errors of `package`, of stepscope and of the system, such as a full disk, are printed in one line. Any other error
    is a bug, and is raised.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # some terminals cannot show all characters
    try:
        return command(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if type(error).__module__.partition(".")[0] in (package, "stepscope"):
            text = f"{type(error).__name__}: {error}"
        elif isinstance(error, OSError) and error.strerror:
            place = "The system refuses to read or write" if error.filename is None else error.filename
            text = f"{place}: {error.strerror}. Check the permissions of this path, or name another path."
        else:
            raise  # a bug in stepscope: the traceback is needed
        print("\n".join(map(printable, text.split("\n"))), file=sys.stderr)  # names may contain escape sequences
        return 1


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ARGUMENTS …",
        help="a Python file, or a program that starts one: torchrun, accelerate launch",
    )
    for kind, what in (("json", "JSON"), ("page", "a page of HTML"), ("markdown", "Markdown, for a pull request")):
        parser.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"also write the results to FILE as {what}")
    parser.add_argument("-m", nargs=argparse.REMAINDER, dest="module", metavar="MODULE", help="run a module instead")


def _minutes(text: str) -> float:
    return _number(text, "a number of minutes")


def _share(text: str) -> float:
    return _number(text.removesuffix("%"), "a percentage, such as 5%") / 100


def _number(text: str, expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text}")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text}")
    return int(text)


# The imports are in the functions so that each command starts quickly: importing PyTorch takes seconds.


def _run(options: argparse.Namespace) -> int:
    from stepscope.base import environment

    environment.refuse()
    from stepscope.run import run

    script = _script_of(options, "run")
    stop = options.then == "stop"
    return run(script, steps=options.steps, folder=options.folder, stop=stop, files=_files(options))


def _files(options: argparse.Namespace) -> dict[str, Path]:
    """Return the requested files by what they contain, as `stepscope.run.write` takes them."""
    asked = {kind: getattr(options, kind) for kind in ("json", "page", "markdown")}
    return {kind: file for kind, file in asked.items() if file is not None}


def _script_of(options: argparse.Namespace, command: str) -> list[str]:
    script = options.script[options.script[:1] == ["--"] :]
    if options.module:  # argparse assigns the arguments after "--" to `script`
        script = ["-m", *options.module, *options.script]
    if not script:
        options.refuse(f"which script? For example: stepscope {command} train.py --epochs 1")
    return list(script)


def _try(options: argparse.Namespace) -> int:
    from stepscope.base import environment

    environment.refuse()
    from stepscope import run, trying
    from stepscope.trying.results import ROUNDS

    wanted = options.settings.split(",") if options.settings else None
    if unknown := [name for name in wanted or () if name not in trying.GROUPS]:
        options.refuse(f"expected some of {', '.join(trying.GROUPS)}; found {', '.join(unknown)}")
    script = _script_of(options, "try")
    run.refuse_unwritable(_files(options))
    tried = trying.run(
        script,
        wanted=wanted,
        rounds=options.rounds or ROUNDS,
        minutes=options.minutes,
        in_copy=options.in_copy,
        steps=options.steps,
    )
    print(tried.text(terminal.colours(sys.stdout)))
    content = {"script": shlex.join(script)} | tried.as_json()
    run.write(_files(options), json.dumps(content, indent=1) + "\n", shlex.join(script))
    return 0


def _traces(options: argparse.Namespace) -> int:
    from stepscope.traces import report

    return 0 if report.show(options.path) else 1


def _diagnose(options: argparse.Namespace) -> int:
    from stepscope import diagnosis
    from stepscope.report import document

    if not options.json:
        return 0 if diagnosis.show(options.path) else 1
    found = [*diagnosis.each(options.path)]
    print(document("diagnose", found), end="")
    return int(any("problem" in each for each in found))


def _compare(options: argparse.Namespace) -> int:
    from stepscope.report import compare

    compared = compare(options.before, options.after)
    print(compared)
    if options.fail_above is None:
        return 0
    slower = compared.slower_than(options.fail_above)
    sure = "surely take" if slower else "do not surely take"
    print(f"{'failed' if slower else 'passed'}  steps {sure} over {100 * options.fail_above:g}% longer")
    return int(slower)


def _page(options: argparse.Namespace) -> int:
    from stepscope import report
    from stepscope.base import staging

    text = report.page(report.load(options.found), f"stepscope: {options.found.stem}")
    target = options.page or options.found.with_suffix(".html")
    staging.write(target, text.encode(errors="replace"))
    print(f"The page is in {target}.")
    return 0


def _rules(options: argparse.Namespace) -> int:
    from stepscope.rules import ALL

    for rule in ALL:
        changes = rule.remedy.replace("\n", "\n    ")
        print(f"{rule.key}: {rule.name}\n    {rule.means}\n    {changes}\n")
    return 0


def _tensorboard(options: argparse.Namespace) -> int:
    if not options.fix:
        from stepscope import tensorboard

        tensorboard.serve(options.logdir)
        return 0
    from stepscope.tensorboard import corrections

    written, refused = corrections.write_copies(*options.fix)
    for error in refused:
        print(f"Not copied: {error}", file=sys.stderr)
    print(f"{len(written)} corrected traces for a plain TensorBoard are in {options.fix[1]}.")
    return 1 if refused else 0
