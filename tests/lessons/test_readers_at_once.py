"""A class on one machine: nobody's port, lock or file is in another's way.

``TEST_READERS=30 python -m pytest -s tests/lessons/test_readers_at_once.py`` also says what memory they took.
"""

import json
import os

import psutil
import pytest
from support.notebooks import NOTEBOOKS
from support.ranks import wait_until
from support.readers import at_once

from stepscope.base import machine

READERS = int(os.environ.get("TEST_READERS", "3"))
FIRST = NOTEBOOKS[:2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + 240 * READERS)]


@pytest.fixture(scope="module")
def classroom(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class")
    readers, together = at_once(READERS, FIRST, folder, OMP_NUM_THREADS="1")
    memory, seconds = sorted(reader.memory for reader in readers), sorted(reader.seconds for reader in readers)
    print(
        f"\n{READERS} readers of {' and '.join(path.stem for path in FIRST)}, preset ci, {machine.cores()} cores: "
        f"{memory[0] / 1e6:,.0f} to {memory[-1] / 1e6:,.0f} MB each, {together / 1e9:.1f} GB at once, "
        f"at the end after {seconds[0]:,.0f} to {seconds[-1]:,.0f} s"
    )
    return folder, readers


def test_all_of_them_come_to_the_end(classroom):
    _, readers = classroom
    assert [reader.error for reader in readers if reader.error] == []
    assert [reader.finished for reader in readers] == [[path.stem for path in FIRST]] * READERS


def test_the_images_are_prepared_once_for_all(classroom):
    folder, _ = classroom
    entries = sorted(path.name for path in (folder / "data").iterdir() if not path.name.endswith(".lock"))
    assert len([name for name in entries if name.startswith("cifar10")]) == 1, entries
    assert not [name for name in entries if name.startswith(".")], "somebody left a staging folder"


def test_each_has_results_and_traces_of_their_own(classroom):
    _, readers = classroom
    for reader in readers:
        lines = [json.loads(line) for line in (reader.runs / "scoreboard.jsonl").read_text().splitlines()]
        assert len(lines) == 1 and lines[0]["rung"].startswith("01 "), lines
        assert list(reader.runs.rglob("*.pt.trace.json.gz"))


def test_no_process_of_theirs_stays(classroom):
    """TensorBoard ends when it notices that its kernel has; what never ends, the time-out of the test finds."""
    folder, _ = classroom
    data = str(folder / "data")

    def theirs():
        processes = psutil.process_iter(["environ"])
        return [each.pid for each in processes if (each.info["environ"] or {}).get("COURSE_DATA") == data]

    wait_until(lambda: not theirs())
