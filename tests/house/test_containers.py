"""The Dockerfile has no findings of hadolint, and the devcontainer uses its Makefile. No Docker runs."""

import re
import subprocess
import sys
from pathlib import Path

import json5
import pytest

from helpers import config

HADOLINT = Path(sys.executable).with_name("hadolint")


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint has no package for this system")
def test_hadolint_has_no_findings():
    process = subprocess.run([HADOLINT, "--no-color", config.PROJECT / "Dockerfile"], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout


def test_what_an_image_is_made_of_is_there_and_made_by_the_makefile():
    text = (config.PROJECT / "Dockerfile").read_text(encoding="utf-8")
    devcontainer = json5.loads((config.PROJECT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    copied = {name for line in re.findall(r"^COPY \S+ (.*) \S+$", text, re.M) for name in line.split()}
    assert all((config.PROJECT / name).exists() for name in copied)
    makefile = (config.PROJECT / "Makefile").read_text(encoding="utf-8")
    needed = {*re.search(r"^\.venv/installed: (.*)$", makefile, re.M)[1].split(), "Makefile"}
    assert all(any(Path(name).is_relative_to(each) for each in copied) for name in needed)
    assert devcontainer["postCreateCommand"] == "make .venv/installed" and "RUN" in text
