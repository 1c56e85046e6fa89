"""What the pages of the project name is there; that their links lead somewhere, the build of the site tests."""

import re

import pytest

from helpers import config


def missing_paths(text):
    """Paths in backticks that do not exist. One without a folder lies in the folder that was named last before it."""
    folder = config.PROJECT
    for name in re.findall(r"`([\w./-]+)`", text):
        path = config.PROJECT / name
        if re.match(r"(helpers|stepscope|tests|notebooks|data)/", name):
            folder = path if name.endswith("/") else path.parent
        elif re.fullmatch(r"\w+\.py", name):
            path = folder / name
        else:
            continue
        if not path.exists() and "NN-" not in name:
            yield name


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_that_a_page_names_exist(name):
    assert list(missing_paths((config.PROJECT / name).read_text(encoding="utf-8"))) == []
