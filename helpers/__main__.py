"""The course's commands: ``python -m helpers check · prepare · run · site · record · tour · ladder · exercise · grade ·
class · slides · colab``. For any other training code there is the command ``stepscope``."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

try:
    from stepscope import cli as stepscope
except ImportError:  # also where only the folder of that name is found
    sys.exit(f"{sys.executable} lacks the course's packages. In the course's folder, `make lab` installs them.")


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 1 if there is a problem."""
    parser = argparse.ArgumentParser(prog="python -m helpers", description="What the course offers in a shell.")
    commands = parser.add_subparsers(required=True)

    def command(function: Callable[[argparse.Namespace], int], text: str) -> Callable[..., argparse.Action]:
        name = function.__name__.strip("_")
        added = commands.add_parser(name, help=text)
        added.set_defaults(command=function)
        return added.add_argument

    option = command(_check, "is this machine ready, and how long will the course take?")
    option("--people", type=int, metavar="N", help="instead, is it ready for N people at once?")
    option = command(_prepare, "get the images, or check the existing ones")
    option("--verify", action="store_true", help="also read every byte of the images")
    option("--preset", metavar="NAME", help="as many as this preset needs (default: COURSE_PRESET, or workshop)")
    option = command(_run, "execute all notebooks and write them as HTML pages")
    option("--core", action="store_true", help="only the core of each, not what goes further")
    option("--record-times", action="store_true", help="store their run times, which `check` prints")
    option = command(_site, "build the course as web pages; execute the notebooks that have no outputs")
    option("--out", metavar="DIR", type=Path, help="folder of the site (default: site); an earlier site is replaced")
    option = command(_record, "execute the notebooks several times, as a reference for others")
    option("notebooks", metavar="NN", nargs="*", help="only these, such as 08 09 (default: all)")
    option("--out", metavar="DIR", type=Path, required=True, help="folder to write; an interrupted recording goes on")
    option("--processes", type=int, default=3, metavar="N", help="how often each is executed (default: 3)")
    option = command(_tour, "record the trace of the guided tour in notebook 01")
    option("--out", metavar="DIR", required=True, help="folder to make")
    command(_ladder, "print the results so far")
    option = command(_exercise, "write a training script with six faults, as in notebook 18")
    option("--seed", type=int, required=True, help="any number; it determines the faults")
    groups = "write N scripts with different faults, for 1 to 99 groups"
    option("--groups", type=int, choices=range(1, 100), metavar="N", help=groups)
    option("--out", metavar="PATH", required=True, help="the script to write; with --groups a folder")
    option = command(_grade, "check whether a fixed script of `exercise` trains the same, and which faults are gone")
    option("--seed", type=int, required=True, help="the script's seed in `exercise`")
    option("path", metavar="FILE", help="the script")
    option = command(_class, "write a page with the results of a whole class")
    option("folder", metavar="FOLDER", help="holds a folder for each reader, with a scoreboard.jsonl")
    option("--out", metavar="FILE", default="class.html", help="the page to write (default: class.html)")
    option("--anonymous", action="store_true", help="leave out the names, and shuffle the readers")
    option = command(_slides, "draw figures for slides, and write a page with notes for each")
    option("--out", metavar="DIR", required=True, help="folder to write; earlier slides are replaced")
    option = command(_colab, "write copies of the notebooks whose first cell gets the course")
    option("--out", metavar="DIR", required=True, help="folder to write; notebooks there are replaced")
    options = parser.parse_args(arguments)
    try:
        return stepscope.execute(options.command, options, "helpers")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("helpers", "stepscope"):
            raise
        sys.exit(f"{sys.executable} lacks {error.name}. In the course's folder, `make lab` installs it.")


# The imports are in the functions so that each command starts as quickly as it can: PyTorch alone takes seconds.


def _check(options: argparse.Namespace) -> int:
    from helpers.lessons import classroom, preflight

    report = preflight.check() if options.people is None else classroom.check(options.people)
    print(report)
    return 1 if report.problems else 0


def _prepare(options: argparse.Namespace) -> int:
    from helpers.data import cifar10, manifests, photos
    from helpers.loading import packs

    if options.preset:
        os.environ["COURSE_PRESET"] = options.preset
    images = cifar10.prepare()
    packs.prepare(images)
    photos.prepare()
    if options.verify:
        manifests.check(images.train.parent, every_byte=True)
        print(f"Every byte of the {images.train_images + images.test_images:,} images is as it was written.")
    return 0


def _run(options: argparse.Namespace) -> int:
    from helpers.data import cifar10
    from helpers.lessons import execute

    data = cifar10.prepare()
    seconds = execute.run(images=data.source, core=options.core)
    if options.record_times and not options.core:
        execute.record_times(seconds, data.source)
    return 0


def _site(options: argparse.Namespace) -> int:
    from helpers import config
    from helpers.data import cifar10
    from helpers.lessons import site

    out = options.out or config.PROJECT / "site"
    site.refresh(cifar10.prepare().source)
    site.build(out)
    print(f"The site is in {out}: open {out / 'index.html'} in a browser.")
    return 0


def _record(options: argparse.Namespace) -> int:
    from helpers import config
    from helpers.lessons import execute, recording

    numbered = {path.stem[:2]: path for path in execute.all_notebooks()}
    if unknown := [number for number in options.notebooks if number not in numbered]:
        raise config.CourseError(f"Expected numbers of notebooks, such as 08, found {', '.join(unknown)}.")
    chosen = [numbered[number] for number in sorted(options.notebooks)]
    failed = recording.record(options.out, chosen, options.processes)
    print((options.out / "README.md").read_text(encoding="utf-8"))
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


def _tour(options: argparse.Namespace) -> int:
    from helpers.results import tour

    print((tour.record(options.out) / tour.PAGE).read_text(encoding="utf-8"))
    return 0


def _ladder(options: argparse.Namespace) -> int:
    from helpers.results import scoreboard

    print(scoreboard.ladder_text())
    return 0


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

    # for a path without a script, which is refused, no images are made
    images = cifar10.prepare().train if Path(options.path).is_file() else Path()
    grade = grading.grade(options.path, options.seed, images)
    print(grade)
    return 0 if grade.passed else 1


def _class(options: argparse.Namespace) -> int:
    from helpers.lessons import class_page

    refused = class_page.write(options.folder, options.out, anonymous=options.anonymous)
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
    print(f"{len(copies)} notebooks that get the course {hosted.release()} are in {options.out}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
