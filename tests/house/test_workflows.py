"""Workflows, forms for issues and the Dockerfile fit their schemas and call what is here. No GitHub, no Docker runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from helpers import config

GITHUB = config.PROJECT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = dict.fromkeys(WORKFLOWS, "github-workflows")
SCHEMAS |= dict.fromkeys(sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), "github-issue-forms")
SCHEMAS[GITHUB / "ISSUE_TEMPLATE" / "config.yml"] = "github-issue-config"
SCHEMAS[GITHUB / "dependabot.yml"] = "dependabot"
SCHEMAS[config.PROJECT / "CITATION.cff"] = "citation-file-format"
HADOLINT = Path(sys.executable).with_name("hadolint")


@pytest.mark.parametrize(("path", "schema"), SCHEMAS.items(), ids=lambda value: getattr(value, "name", value))
def test_the_file_fits_its_schema(path, schema):
    checked = CliRunner().invoke(check_jsonschema, ["--builtin-schema", f"vendor.{schema}", str(path)])
    assert checked.exit_code == 0, checked.output


def test_the_workflows_may_read_only_and_call_targets_and_tests_that_are_there():
    text = "\n".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    assert all(
        yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"} for path in WORKFLOWS
    )
    targets = set(re.findall(r"^([\w./-]+):", (config.PROJECT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^\s*(?:run: )?make ([\w./-]+)", text, re.MULTILINE)) <= targets
    assert [name for name in re.findall(r"\btests/[\w/]+\.py", text) if not (config.PROJECT / name).exists()] == []


def test_what_others_publish_is_named_by_its_digest():
    """A name such as v7 can be given to another commit, by whoever has taken over its repository."""
    used = [use for path in WORKFLOWS for use in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))]
    assert used and [use for use in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", use)] == []
    dockerfile = (config.PROJECT / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^FROM \S+@sha256:[0-9a-f]{64}$", dockerfile, re.MULTILINE)


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint has no package for this system")
def test_hadolint_has_no_findings_and_what_the_dockerfile_copies_is_there():
    dockerfile = config.PROJECT / "Dockerfile"
    process = subprocess.run([HADOLINT, "--no-color", dockerfile], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout
    lines = re.findall(r"^COPY \S+ (.*) \S+$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    assert lines and all((config.PROJECT / name).exists() for line in lines for name in line.split())
