"""Files of results that no run has written."""

import json

from stepscope import report
from stepscope.report.findings import Diagnosis, Finding

HOSTILE = '<script>alert("\x1b[2J")</script>'
TRIED = {
    "version": 1, "command": "try", "script": "train.py", "rounds": 5, "steps": 40, "step_ms": 12.5,
    "settings": [
        {"name": "num_workers=2", "change": {"loader": {"num_workers": 2}}, "problem": None, "memory_bytes": 1e9,
         "learns": "the same losses", "ratio": {"mean": 1.01, "lowest": 0.95, "highest": 1.08, "count": 5}},
        {"name": "num_workers=4", "change": {"loader": {"num_workers": 4}}, "problem": None, "memory_bytes": 1e9,
         "learns": "the same losses", "ratio": {"mean": 1.5, "lowest": 1.4, "highest": 1.6, "count": 5}},
        {"name": "channels_last", "change": {"network": {"channels_last": True}}, "problem": "fails: <no memory>",
         "memory_bytes": None, "learns": None, "ratio": None},
    ],
    "together": None,
    "recommended": {"change": {"loader": {"num_workers": 4}}, "lines": ["DataLoader(…, num_workers=4)  # train.py:3"]},
}  # fmt: skip


def found(
    *steps, waits=0.0, key="items.slow", name="slow items", line="train.py:7: read()", gain=0.5, apart=0.0,
    change="cache(…)", shares=(),
):  # fmt: skip
    """Return a diagnosis of steps, in ms."""
    finding = Finding(key, name, "loading", gain, "Half of a step.", change, "caching", line)
    times = tuple((waits, ms) for ms in steps)
    return Diagnosis(
        "loading", "It waits.", 10.0, (("a", "b"),), (finding,), steps=times, apart_ms=apart, shares=dict(shares)
    )


def write(path, *diagnoses, **others):
    """Write a file of results with a diagnosis for each rank; return its path."""
    content = [{"rank": rank, "diagnosis": each.as_json(), **others} for rank, each in enumerate(diagnoses)]
    path.parent.mkdir(exist_ok=True)
    path.write_text(report.document("run", content))
    return path


def write_tried(path, content=TRIED):
    """Write a file of tried settings; return its path."""
    path.write_text(json.dumps(content))
    return path
