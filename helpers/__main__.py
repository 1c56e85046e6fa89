"""The shell's door: ``python -m helpers check · prepare · run · site · record · tour · ladder · tensorboard · traces ·
diagnose · exercise · grade · class · slides · colab``."""

from __future__ import annotations

import argparse
import io
import os
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 1 if there is a problem."""
    parser = argparse.ArgumentParser(prog="python -m helpers", description="What the course offers in a shell.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="is this machine ready, and how long will the course take?")
    check.add_argument("--people", type=int, metavar="N", help="instead, is it ready for so many people at once?")
    prepare = commands.add_parser("prepare", help="get the images, or check those that are there")
    prepare.add_argument("--verify", action="store_true", help="then also read every byte of them")
    run = commands.add_parser("run", help="execute all notebooks and write them as HTML pages")
    run.add_argument("--record-times", action="store_true", help="store how long they took, for the estimate of check")
    site = commands.add_parser("site", help="build the course as web pages; execute the notebooks that have no outputs")
    site.add_argument("--out", metavar="DIR", help="folder of the site (default: site); an earlier site is replaced")
    record = commands.add_parser("record", help="time and trace every rung without Jupyter, as a reference for others")
    record.add_argument("--out", metavar="DIR", required=True, help="folder to write; an interrupted recording goes on")
    tour = commands.add_parser("tour", help="record the trace that the guided tour in notebook 01 goes through")
    tour.add_argument("--out", metavar="DIR", required=True, help="folder to write; an earlier tour is replaced")
    commands.add_parser("ladder", help="print the results so far")
    tensorboard = commands.add_parser("tensorboard", help="show traces in the corrected profiler tab")
    tensorboard.add_argument("logdir", metavar="LOGDIR", help="folder of the traces")
    tensorboard.add_argument("out", metavar="OUT", nargs="?", help="with --fix: folder for the copies")
    tensorboard.add_argument(
        "--fix", action="store_true", help="write corrected copies, for a plain TensorBoard, instead"
    )
    traces = commands.add_parser("traces", help="print traces as tables: steps, loading, accelerators, kernels, gaps")
    traces.add_argument("path", metavar="PATH", help="a trace, the folder of a run, or a folder of runs")
    diagnose = commands.add_parser("diagnose", help="say where the bottleneck is in each trace, and what to change")
    diagnose.add_argument("path", metavar="TRACE_OR_LOGDIR", help="a trace, the folder of a run, or a folder of runs")
    exercise = commands.add_parser("exercise", help="write a training script with six faults, as in notebook 14")
    exercise.add_argument("--seed", type=int, required=True, help="any number; each stands for other faults")
    exercise.add_argument("--groups", type=int, metavar="N", help="a script for each group of a class, of other faults")
    exercise.add_argument("--out", metavar="PATH", required=True, help="the script to write; with --groups a folder")
    grade = commands.add_parser("grade", help="time a fixed script of `exercise`, and check that it trains the same")
    grade.add_argument("--seed", type=int, required=True, help="the number that it was drawn with")
    grade.add_argument("path", metavar="FILE", help="the script")
    class_ = commands.add_parser("class", help="write a page with the results of a whole class")
    class_.add_argument("folder", metavar="FOLDER", help="with a folder for each reader that holds a scoreboard.jsonl")
    class_.add_argument("--out", metavar="FILE", default="class.html", help="the page to write (default: class.html)")
    class_.add_argument("--anonymous", action="store_true", help="leave out the names, and shuffle the readers")
    slides = commands.add_parser("slides", help="draw figures for slides, and a page with what to say to each")
    slides.add_argument("--out", metavar="DIR", required=True, help="folder to write; earlier slides are replaced")
    colab = commands.add_parser("colab", help="write copies of the notebooks that get the course where they are opened")
    colab.add_argument("--out", metavar="DIR", required=True, help="folder to write; notebooks there are replaced")
    options = parser.parse_args(arguments)
    if options.command == "tensorboard" and options.fix != (options.out is not None):
        tensorboard.error("--fix needs LOGDIR and OUT; without it, name LOGDIR alone")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal can show all characters
    try:
        return _COMMANDS[options.command](options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads the output, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("helpers"):
            raise
        print(
            f"{sys.executable} lacks {error.name}. Use the course's own Python, .venv/bin/python or that of your "
            "conda environment; in the course's folder, `make lab` installs it.",
            file=sys.stderr,
        )
        return 1
    except Exception as error:
        if not type(error).__module__.startswith("helpers."):
            raise  # a fault of ours: its traceback is needed
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


# The imports are in the functions so that each command starts as quickly as it can: PyTorch alone takes seconds.


def _check(options: argparse.Namespace) -> int:
    from helpers.lessons import classroom, preflight

    report = preflight.check() if options.people is None else classroom.check(options.people)
    print(report)
    return 1 if report.problems else 0


def _prepare(options: argparse.Namespace) -> int:
    from helpers.data import cifar10, photos
    from helpers.loading import packs

    images = cifar10.prepare()
    packs.prepare(images)
    photos.prepare()
    if options.verify:
        cifar10.verify(images.train.parent)
        print(f"Every byte of the {images.train_images + images.test_images:,} images is as it was written.")
    return 0


def _run(options: argparse.Namespace) -> int:
    from helpers.data import cifar10
    from helpers.lessons import execute

    data = cifar10.prepare()
    took = execute.run(images=data.source)
    if options.record_times:
        execute.record_times(took, data.source)
    return 0


def _site(options: argparse.Namespace) -> int:
    from pathlib import Path

    from helpers import config
    from helpers.data import cifar10
    from helpers.lessons import site

    out = Path(options.out or config.PROJECT / "site")
    site.refresh(cifar10.prepare().source)
    site.build(out)
    print(f"The site is in {out}: open {out / 'index.html'} in a browser.")
    return 0


def _record(options: argparse.Namespace) -> int:
    from pathlib import Path

    from helpers.results import recording, rungs

    left_out = recording.record_reference(rungs.GROUPS, Path(options.out), _draw_ladder)
    print((Path(options.out) / "README.md").read_text(encoding="utf-8"))
    return 1 if left_out else 0


def _tour(options: argparse.Namespace) -> int:
    from helpers.results import tour

    print((tour.record(options.out) / tour.PAGE).read_text(encoding="utf-8"))
    return 0


def _draw_ladder(table, path) -> None:
    from helpers import figures  # needs Matplotlib, which a machine that only records may lack

    figures.ladder(table).save(path)
    if not table.empty:
        figures.waiting(table).save(path.with_name("waiting.png"))


def _ladder(options: argparse.Namespace) -> int:
    from helpers.results import scoreboard

    print(scoreboard.ladder_text())
    return 0


def _tensorboard(options: argparse.Namespace) -> int:
    from helpers import tensorboard

    if not options.fix:
        tensorboard.serve(options.logdir)
        return 0
    from helpers.tensorboard import fix

    fixed = fix.fix(options.logdir, options.out)
    for error in fixed.refused:
        print(f"Not copied: {error}", file=sys.stderr)
    print(f"{len(fixed.written)} corrected traces for a plain TensorBoard are in {options.out}.")
    return 1 if fixed.refused else 0


def _traces(options: argparse.Namespace) -> int:
    from helpers.traces import report

    return 0 if report.show(options.path) else 1


def _diagnose(options: argparse.Namespace) -> int:
    from helpers import diagnosis
    from helpers.lessons import topics

    return 0 if diagnosis.show(options.path, topics.links("notebooks/")) else 1


def _exercise(options: argparse.Namespace) -> int:
    from helpers.data import cifar10
    from helpers.lessons import faults

    images = cifar10.prepare().train
    if options.groups is None:
        faults.write(options.out, faults.draw(options.seed), images)
        return 0
    scripts = faults.write_for_groups(options.out, options.groups, options.seed, images)
    print("\nEach group grades its own script with its own seed:")
    print("\n".join(f"  python -m helpers grade --seed {seed} {path}" for path, seed in scripts.items()))
    return 0


def _grade(options: argparse.Namespace) -> int:
    from helpers.data import cifar10
    from helpers.lessons.faults import grading

    grade = grading.grade(options.path, options.seed, cifar10.prepare().train)
    print(grade)
    return 0 if grade.passed else 1


def _class(options: argparse.Namespace) -> int:
    from helpers import figures
    from helpers.lessons import class_page

    refused = class_page.write(options.folder, options.out, figures.ratios, anonymous=options.anonymous)
    print(f"Wrote {options.out}.")
    for error in refused:
        print(f"Left out: {error}", file=sys.stderr)
    return 1 if refused else 0


def _slides(options: argparse.Namespace) -> int:
    from helpers.figures import slides

    print(slides.write(options.out))
    return 0


def _colab(options: argparse.Namespace) -> int:
    from helpers.lessons import hosted

    copies = hosted.write_copies(options.out)
    print(f"{len(copies)} notebooks that get the course of {hosted.release()} are in {options.out}.")
    return 0


_COMMANDS = {
    "check": _check,
    "prepare": _prepare,
    "run": _run,
    "site": _site,
    "record": _record,
    "tour": _tour,
    "ladder": _ladder,
    "tensorboard": _tensorboard,
    "traces": _traces,
    "diagnose": _diagnose,
    "exercise": _exercise,
    "grade": _grade,
    "class": _class,
    "slides": _slides,
    "colab": _colab,
}

if __name__ == "__main__":
    sys.exit(main())
