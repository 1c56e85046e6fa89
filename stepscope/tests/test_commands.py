"""Tests of the commands' help and of their pages."""

import re
from pathlib import Path

import pytest

from stepscope.cli import main

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


@pytest.mark.parametrize("name", ["file/x", "n" * 300], ids=["a file in the way", "a name too long"])
@pytest.mark.parametrize(
    "command", ["traces", "diagnose", "page", "compare {0}", "tensorboard", "tensorboard --fix {0}"]
)
def test_an_error_of_the_system_is_printed_in_a_few_lines_that_name_the_path(tmp_path, capsys, command, name):
    (tmp_path / "file").touch()
    assert main([*command.format(tmp_path / name).split(), str(tmp_path / name)]) == 1
    said = "".join(capsys.readouterr()).strip()
    assert str(tmp_path / name) in said and said.count("\n") < 5
