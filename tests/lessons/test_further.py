"""The page for experts: its code, run in one process in the order of the page."""

import re
import subprocess
import sys

import pytest

from helpers import config

PAGE = config.PROJECT / "notebooks" / "further.md"


@pytest.mark.slow
@pytest.mark.processes
def test_the_code_of_the_page_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 8
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.startswith("448")
