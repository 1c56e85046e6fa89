"""Published scripts, as they are and with a planted fault. `scripts.py` examines more, and what each fault costs."""

import subprocess

import pytest
import scripts

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]
KINDS = ("slow items", "slow collating", "`.item()` in a loop", "checkpoint in each step")


@pytest.fixture(scope="module")
def examination(tmp_path_factory):
    asked = subprocess.run(["git", "ls-remote", f"{scripts.GITHUB}/pytorch/examples", "HEAD"], capture_output=True)
    if asked.returncode:
        pytest.skip("GitHub cannot be reached.")
    return scripts.Examination(tmp_path_factory.mktemp("published"), install=False)


@pytest.mark.parametrize("name", ["siamese", "nanoGPT"])
def test_nothing_is_found_in_a_healthy_script(examination, name):
    (script,) = (each for each in scripts.SCRIPTS if each.name == name)
    diagnosis = examination.diagnosed(examination.placed(script), script.arguments.split())
    assert [each for each in diagnosis["findings"] if each["gain"] >= scripts.WORTH] == []


@pytest.mark.parametrize("fault", [each for each in scripts.FAULTS if each.kind in KINDS], ids=lambda fault: fault.kind)
def test_the_line_of_a_planted_fault_is_named(examination, fault):
    (script,) = (each for each in scripts.SCRIPTS if each.name == fault.script)
    path = examination.placed(script, fault.edits)
    diagnosis = examination.diagnosed(path, script.arguments.split())
    assert scripts.is_right(fault, path, diagnosis), diagnosis
