"""Workflows, forms for issues and hooks fit their schemas and call only what is here. GitHub itself is not asked."""

import re
import shlex
import tomllib
from itertools import pairwise

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner
from packaging.requirements import Requirement

from helpers import config

WORKFLOWS = {path.stem: path for path in sorted((config.PROJECT / ".github" / "workflows").glob("*.yml"))}
FORMS = config.PROJECT / ".github" / "ISSUE_TEMPLATE"
HOOKS = config.PROJECT / ".pre-commit-config.yaml"
SCHEMAS = {path: "github-issue-forms" for path in sorted(FORMS.glob("*.yml")) if path.name != "config.yml"}
SCHEMAS |= {FORMS / "config.yml": "github-issue-config", config.PROJECT / "CITATION.cff": "citation-file-format"}
MAKEFILE = (config.PROJECT / "Makefile").read_text(encoding="utf-8")
CONTRIBUTING = (config.PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([\w./-]+):", MAKEFILE, re.MULTILINE))
ACTION = re.compile(r"actions/[a-z-]+@v\d+")
# What a job may do beyond reading: deploy the site, and push the branch that Colab opens
MAY = {"deploy": {"pages": "write", "id-token": "write"}, "colab": {"contents": "write"}}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((config.PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def markers(pytestconfig):
    return {re.match(r"\w+", marker)[0] for marker in pytestconfig.getini("markers")}


def fits_the_schema(path, schema="github-workflows"):
    return CliRunner().invoke(check_jsonschema, ["--builtin-schema", f"vendor.{schema}", str(path)])


def commands(script):
    """The simple commands of a shell script, each as a list of words."""
    for line in re.sub(r"\\\n", " ", script).splitlines():
        words = shlex.split(line, comments=True)
        ends = [place for place, word in enumerate(words) if word in ("&&", "||", "|", ";", "&")]
        for start, end in zip([-1, *ends], [*ends, len(words)], strict=True):
            if words[start + 1 : end]:
                yield words[start + 1 : end]


def given(command, option):
    """What follows an option of pytest in a command, each time that it is there."""
    arguments = command[command.index("pytest") :] if "pytest" in command else []
    return [value for name, value in pairwise(arguments) if name == option]


def missing(command, markers):
    """What a command names and this project does not have."""
    if command[0] == "make":
        yield from (word for word in command[1:] if "=" not in word and word not in TARGETS)
    for expression in given(command, "-m"):
        yield from set(re.findall(r"\w+", expression)) - {"not", "and", "or"} - markers
    for name in given(command, "-k"):
        if not list((config.PROJECT / "notebooks").glob(f"{name}*.ipynb")):
            yield name
    for word in command:
        path, _, test = word.partition("::")
        if path.startswith("tests/") and not (config.PROJECT / path).exists():
            yield path
        elif test and f"def {test}(" not in (config.PROJECT / path).read_text(encoding="utf-8"):
            yield test


def faults(text, markers):
    """What is wrong with a workflow beyond what the schema can say."""
    workflow = yaml.safe_load(text)
    if workflow.get("permissions") != {"contents": "read"}:
        yield "permissions"
    for name, job in workflow["jobs"].items():
        if job.get("permissions", {}) != MAY.get(name, {}):
            yield f"permissions of {name}"
        if not isinstance(job.get("timeout-minutes"), int):
            yield "timeout-minutes"
        for step in job["steps"]:
            if "uses" in step and not ACTION.fullmatch(step["uses"]):
                yield step["uses"]
            for command in commands(step.get("run", "")):
                yield from missing(command, markers)


def lowest(requirement):
    return next(specifier.version for specifier in requirement.specifier if specifier.operator == ">=")


# ----------------------------------------------------------------------------------------------------- each workflow


def test_there_is_a_workflow_for_every_change_one_for_every_week_and_one_for_the_site():
    assert list(WORKFLOWS) == ["site", "tests", "weekly"]


@pytest.mark.parametrize("path", WORKFLOWS.values(), ids=WORKFLOWS)
def test_the_workflow_fits_the_schema_of_github(path):
    checked = fits_the_schema(path)
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize("path", WORKFLOWS.values(), ids=WORKFLOWS)
def test_the_workflow_may_only_what_it_must_ends_in_time_and_calls_what_is_there(path, markers):
    assert list(faults(path.read_text(encoding="utf-8"), markers)) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("runs-on: ", "runs_on: "),
        ("  pull_request:", "  pull_requests:"),
        ("timeout-minutes: 90", "timeout-minutes: [90]"),
        ("contents: read", "contents: all"),
        ("run: make test", "run: [make, test]"),
    ],
)
def test_a_workflow_with_a_mistake_does_not_fit_the_schema(right, wrong, tmp_path):
    text = WORKFLOWS["tests"].read_text(encoding="utf-8")
    assert right in text
    (tmp_path / "wrong.yml").write_text(text.replace(right, wrong, 1), encoding="utf-8")
    assert fits_the_schema(tmp_path / "wrong.yml").exit_code == 1


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("    timeout-minutes: 90", "    # none", "timeout-minutes"),
        ("contents: read", "contents: write", "permissions"),
        ("actions/checkout@v7", "actions/checkout@main", "actions/checkout@main"),
        ("run: make test", "run: make tests", "tests"),
        ("tests/notebooks/test_notebooks.py", "tests/test_notebook.py", "tests/test_notebook.py"),
        ("not browser", "not browsers", "browsers"),
        ("00-start-here", "00-begin-here", "00-begin-here"),
    ],
)
def test_a_workflow_that_calls_what_is_not_there_is_found_out(right, wrong, fault, markers):
    text = WORKFLOWS["tests"].read_text(encoding="utf-8")
    assert right in text
    assert list(faults(text.replace(right, wrong, 1), markers)) == [fault]


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("      pages: write", "      contents: write", "permissions of deploy"),
        ("run: make site", "run: make sites", "sites"),
    ],
)
def test_the_site_may_be_deployed_by_one_job_only(right, wrong, fault, markers):
    text = WORKFLOWS["site"].read_text(encoding="utf-8")
    assert right in text
    assert list(faults(text.replace(right, wrong, 1), markers)) == [fault]


def test_the_site_is_deployed_where_pages_is_set_up_and_from_main_only():
    site = yaml.safe_load(WORKFLOWS["site"].read_text(encoding="utf-8"))
    assert site["jobs"]["deploy"]["if"] == "vars.PAGES == 'true' && github.ref_name == 'main'"
    assert site["jobs"]["deploy"]["needs"] == "build"


# ------------------------------------------------------------------------------- forms for issues, citation, and hooks


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_the_form_fits_its_schema(path):
    checked = fits_the_schema(path, SCHEMAS[path])
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize(
    ("path", "right", "wrong"),
    [
        (FORMS / "trace.yml", "type: textarea", "type: text"),
        (FORMS / "check.yml", "      multiple: true\n      options:", "      choices:"),
        (FORMS / "config.yml", "true", "perhaps"),
        (config.PROJECT / "CITATION.cff", "  - MIT", "  - My own"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_form_with_a_mistake_does_not_fit_its_schema(path, right, wrong, tmp_path):
    text = path.read_text(encoding="utf-8")
    assert right in text
    (tmp_path / path.name).write_text(text.replace(right, wrong, 1), encoding="utf-8")
    assert fits_the_schema(tmp_path / path.name, SCHEMAS[path]).exit_code == 1


def test_the_citation_has_the_title_and_the_licences_of_the_project(project):
    citation = yaml.safe_load((config.PROJECT / "CITATION.cff").read_text(encoding="utf-8"))
    readme = (config.PROJECT / "README.md").read_text(encoding="utf-8")
    assert readme.startswith(f"# {citation['title']}\n")
    assert " AND ".join(citation["license"]) == project["license"]


def test_the_citation_names_the_repository_that_the_rest_of_the_project_names():
    citation = yaml.safe_load((config.PROJECT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation.get("repository-code", "") == config.REPOSITORY
    assert config.REPOSITORY == "" or re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", config.REPOSITORY)


def test_each_hook_calls_what_is_here_and_installs_nothing(markers):
    repositories = yaml.safe_load(HOOKS.read_text(encoding="utf-8"))["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    for hook in repositories[0]["hooks"]:
        assert hook["language"] == "system"
        (command,) = commands(hook["entry"])
        assert command[:2] == [".venv/bin/python", "-m"]
        assert list(missing(command, markers)) == []


# ------------------------------------------------------------------------------------- what is written in two places


def test_windows_runs_the_quick_tests_of_the_makefile():
    steps = yaml.safe_load(WORKFLOWS["tests"].read_text(encoding="utf-8"))["jobs"]["windows"]["steps"]
    expressions = [
        given(command, "-m") for step in steps for command in commands(step.get("run", "")) if given(command, "-m")
    ]
    assert len(expressions) == 1 and expressions[0][0] in MAKEFILE


def test_every_change_is_tested_with_the_oldest_python(project):
    linux = yaml.safe_load(WORKFLOWS["tests"].read_text(encoding="utf-8"))["jobs"]["linux"]
    versions = [one["python"] for one in linux["strategy"]["matrix"]["include"]]
    assert lowest(Requirement(f"python{project['requires-python']}")) in versions


def test_the_weekly_lowest_pytorch_is_the_lowest_that_the_project_allows(project):
    (torch,) = [wanted for wanted in map(Requirement, project["dependencies"]) if wanted.name == "torch"]
    assert f'"torch=={lowest(torch)}.*"' in WORKFLOWS["weekly"].read_text(encoding="utf-8")


def test_the_weekly_lock_is_made_as_contributors_make_it():
    relock = yaml.safe_load(WORKFLOWS["weekly"].read_text(encoding="utf-8"))["jobs"]["linux"]["env"]["RELOCK"].strip()
    assert f".venv/bin/{relock}" in " ".join(CONTRIBUTING.replace("\\\n", " ").split())


def test_contributors_find_commands_that_exist(markers):
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", CONTRIBUTING, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`((?:make|\.venv/bin/python) [^`]+)`", CONTRIBUTING)
    named = [command for script in blocks + inline for command in commands(script)]
    assert named and [word for command in named for word in missing(command, markers)] == []
