"""Workflows and forms for issues fit their schemas and call only what is here. GitHub itself is not asked."""

import re

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from helpers import config

GITHUB = config.PROJECT / ".github"
SCHEMAS = dict.fromkeys(sorted((GITHUB / "workflows").glob("*.yml")), "github-workflows")
SCHEMAS |= dict.fromkeys(sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), "github-issue-forms")
SCHEMAS[GITHUB / "ISSUE_TEMPLATE" / "config.yml"] = "github-issue-config"
SCHEMAS[config.PROJECT / "CITATION.cff"] = "citation-file-format"


@pytest.mark.parametrize(("path", "schema"), SCHEMAS.items(), ids=lambda value: getattr(value, "name", value))
def test_the_file_fits_its_schema(path, schema):
    checked = CliRunner().invoke(check_jsonschema, ["--builtin-schema", f"vendor.{schema}", str(path)])
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize("path", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_a_workflow_may_read_only_ends_in_time_and_calls_what_is_there(path):
    text = path.read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert all(isinstance(job["timeout-minutes"], int) for job in workflow["jobs"].values())
    targets = set(re.findall(r"^([\w./-]+):", (config.PROJECT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^\s*(?:run: )?make ([\w./-]+)", text, re.MULTILINE)) <= targets
    assert [name for name in re.findall(r"\btests/[\w/]+\.py", text) if not (config.PROJECT / name).exists()] == []
