"""Tests of the commands' help and of their pages."""

import re
from pathlib import Path

import pytest

from stepscope.__main__ import main

DOCS = Path(__file__).parents[1] / "docs"
COMMANDS = sorted(path.stem for path in DOCS.glob("*.md"))


def help_of(capsys, *command):
    with pytest.raises(SystemExit, match="^0$"):
        main([*command, "--help"])
    return capsys.readouterr().out


def test_each_command_has_a_page_that_the_readme_links(capsys):
    (named,) = re.findall(r"\{([a-z,]+)\} \.\.\.", help_of(capsys))
    assert sorted(named.split(",")) == COMMANDS
    readme = DOCS.with_name("README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"docs/(\w+)\.md", readme)) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_names_each_option_of_its_command_and_no_other(capsys, command):
    page = (DOCS / f"{command}.md").read_text(encoding="utf-8")
    options = set(re.findall(r"^  (--[a-z-]+)", help_of(capsys, command), re.MULTILINE))
    assert set(re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE)) == options
