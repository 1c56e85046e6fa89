"""Published scripts, as they are and with a planted fault. `scripts.py` examines more, and what each fault costs."""

import subprocess

import examine
import pytest
import scripts

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]
HEALTHY = ("siamese", "nanoGPT")
KINDS = ("slow items", "slow collating", "`.item()` in a loop", "checkpoint in each step")


@pytest.fixture(scope="module")
def examination(tmp_path_factory):
    asked = subprocess.run(["git", "ls-remote", f"{scripts.GITHUB}/pytorch/examples", "HEAD"], capture_output=True)
    if asked.returncode:
        pytest.skip("GitHub cannot be reached.")
    return scripts.Examination(tmp_path_factory.mktemp("published"), install=False)


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, None) for name in HEALTHY] + [(each.script, each) for each in scripts.FAULTS if each.kind in KINDS],
    ids=lambda given: getattr(given, "kind", given),
)
def test_the_line_of_a_planted_fault_is_named_and_a_healthy_script_is_not_accused(examination, name, fault):
    (script,) = (each for each in scripts.SCRIPTS if each.name == name)
    path = examination.placed(script, fault.edits if fault else ())
    found = examination.diagnosed(path, script.arguments)
    row = examine.judged({"machine": "here"} | scripts.record_of(name, path, found, fault))
    assert row["right"], found["diagnosis"]
