"""Reads a Dockerfile, and runs its steps without Docker: as they are, in a folder that stands for the image."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction and its arguments, in order, without comments; lines that go on are joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n", " ", lines).splitlines():
        if line.strip():
            name, _, arguments = line.strip().partition(" ")
            yield name, " ".join(arguments.split())


def without_flags(arguments: str) -> str:
    """The arguments without options such as ``--chown=1000``, which only Docker knows."""
    return re.sub(r"^(--\S+ )+", "", arguments)


def copy(context: Path, files: list[str], arguments: str, folder: Path) -> None:
    """What COPY does with these files of the context; the last argument is a folder."""
    *sources, target = without_flags(arguments).split()
    for source in sources:
        for name in files if source == "." else [source]:
            place = folder / target / (name if source == "." else Path(name).name)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(context / name, place)


def context_files(context: Path) -> list[str]:
    """Files of the project as Git knows them: the new ones, too, not those that it ignores."""
    listed = subprocess.run(
        ["git", "-C", context, "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listed.stdout.split("\0") if name and (context / name).is_file()]


def variables(arguments: str) -> dict[str, str]:
    """What ``ARG`` or ``ENV`` sets."""
    return {name: value.strip('"') for name, value in (pair.split("=", 1) for pair in arguments.split())}


def run_steps(text: str, context: Path, folder: Path, environment: dict[str, str]) -> list[str]:
    """Run the steps that a user without rights runs, in order, in `folder` as working directory; return them.

    Those of root come before USER. They would change this machine, so they are left to a system of its own.
    """
    files, ran, environment, user = context_files(context), [], os.environ | environment, False
    for name, arguments in instructions(text):
        user |= name == "USER"
        if name in ("ARG", "ENV"):
            environment |= variables(arguments)
        elif name == "COPY":
            copy(context, files, arguments, folder)
        elif name == "RUN" and user:
            ran.append(without_flags(arguments))
            subprocess.run(["sh", "-c", ran[-1]], cwd=folder, env=environment, check=True)
    return ran
