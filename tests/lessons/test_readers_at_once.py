"""A class on one machine: nobody's port, lock or file is in another's way.

``TEST_READERS=30 python -m pytest -s tests/lessons/test_readers_at_once.py`` also says what memory they took.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from support import ranks
from support.notebooks import NOTEBOOKS, environment

MEASURED = "TEST_READERS" in os.environ
READERS = int(os.environ.get("TEST_READERS", "2"))
FIRST = NOTEBOOKS[:2]
CODE = "import sys; from pathlib import Path; from helpers.lessons import execute; "
CODE += f"execute.run([*map(Path, sys.argv[1:])], core={not MEASURED})"


def memory(shell):
    """Return the bytes of a reader's Jupyter kernel and all that it started: shared pages are divided among them."""
    total = 0
    with suppress(psutil.Error):
        for process in psutil.Process(shell.pid).children(recursive=True):
            with suppress(psutil.Error):
                total += process.memory_full_info().pss + process.memory_full_info().swap
    return total


@pytest.mark.slow
@pytest.mark.timeout(600 + 240 * READERS)
def test_readers_who_begin_at_the_same_moment_come_to_the_end_and_leave_nothing_in_the_way(tmp_path):
    runs = [tmp_path / f"runs-{number}" for number in range(READERS)]
    shells = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, *FIRST],
            env=environment(tmp_path / "data", own) | {"OMP_NUM_THREADS": "1", ranks.MARK: str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=(tmp_path / f"{own.name}.log").open("w"),
        )
        for own in runs
    ]
    most = 0
    while MEASURED and any(shell.poll() is None for shell in shells):
        start = time.monotonic()
        most = max(most, sum(map(memory, shells)))
        time.sleep(2 + 9 * (time.monotonic() - start))  # or looking takes a core
    if MEASURED:
        print(f"\n{READERS} readers of {' and '.join(path.stem for path in FIRST)}: {most / 1e9:.1f} GB at once")
    assert [own.with_suffix(".log").read_text() for own, shell in zip(runs, shells, strict=True) if shell.wait()] == []
    for own in runs:
        lines = [json.loads(line) for line in (own / "scoreboard.jsonl").read_text().splitlines()]
        assert [line["rung"][:3] for line in lines] == ["01 "]
        assert list(own.rglob("*.pt.trace.json.gz"))
    prepared = [path.name for path in (tmp_path / "data").iterdir() if path.suffix != ".lock"]
    assert len([name for name in prepared if name.startswith("cifar10")]) == 1, "images are prepared once for all"
    assert not [name for name in prepared if name.startswith(".")], "somebody left a staging folder"
    ranks.wait_until(lambda: not ranks.processes(str(tmp_path)))  # TensorBoard ends when it notices that its kernel has
