"""The page on Lightning, Trainer and Accelerate: its code, with the versions that it names, beside the plain loop."""

import json
import os
import re
import subprocess
import sys

import pytest

from helpers import config

pytestmark = [pytest.mark.slow, pytest.mark.processes]
NOTEBOOKS = config.PROJECT / "notebooks"
PAGE = (NOTEBOOKS / "frameworks.md").read_text(encoding="utf-8")
OURS = ["torch", "numpy", "psutil", "filelock"]  # what is here already: not to be had twice
SHARED, *_ = BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# Notes which workers load, and in which types autocast computes; at the end, how often was compiled, and the layouts
SEEN = """
import json
import torch.utils.data.dataloader
seen = {"workers": set(), "types": set()}
begin, init, make = torch.utils.data.DataLoader.__iter__, torch.autocast.__init__, network


def noted_begin(loader):
    seen["workers"].add(loader.num_workers)
    return begin(loader)


def noted_init(self, device_type, dtype=None, *args, **kwargs):
    seen["types"].add(str(dtype))
    return init(self, device_type, dtype, *args, **kwargs)


def network():
    global made
    made = make()
    return made


torch.utils.data.DataLoader.__iter__, torch.autocast.__init__ = noted_begin, noted_init
"""
SAID = """
seen = {name: sorted(values) for name, values in seen.items()}
seen["compiled"] = torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
seen["channels_last"] = made[1].weight.is_contiguous(memory_format=torch.channels_last)
print(json.dumps(seen | {"losses": [float(loss) for loss in losses]}))
"""
PLAIN = """
model = network()
optimizer = recipes.fused_sgd(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(enabled=False)
for _ in range(12):
    for images, labels in recipes.loader_of(dataset, 16, workers=0):
        losses.append(recipes.mixed_step(model, optimizer, scaler, augmented(images), labels))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frameworks")
    (folder / "without.txt").write_text("\n".join(f'{name}; sys_platform == "never"' for name in OURS))
    (packages,) = re.findall(r"pip install (.*)", PAGE)
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    without = ["--target", folder / "site", "--overrides", folder / "without.txt"]
    subprocess.run([*uv, *without, *packages.split()], check=True)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "site"), str(NOTEBOOKS)]), "HF_HUB_OFFLINE": "1"}


def run(code, folder, environment, *arguments):
    """Run the shared code and this one as a script, and return what it says at the end."""
    script = folder / "train.py"
    script.write_text("\n".join([SHARED, SEEN, code, SAID]), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, script, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plain(environment, tmp_path_factory):
    return run(PLAIN, tmp_path_factory.mktemp("plain"), environment)["losses"]


@pytest.mark.parametrize("code", BLOCKS[1:], ids=["Lightning", "Trainer", "Accelerate"])
def test_a_framework_learns_as_the_plain_loop_with_each_change_and_goes_on_after_a_stop(
    code, environment, plain, tmp_path
):
    """Each epoch is one batch, so its order does not matter."""
    first = run(code, tmp_path, environment)
    seen = {name: value for name, value in first.items() if name != "losses"}
    assert seen == {"workers": [2], "types": ["torch.bfloat16"], "compiled": True, "channels_last": True}
    assert first["losses"][:6] == pytest.approx(plain[:6], rel=0.02) and plain[5] < 0.9 * plain[0]
    assert len(list(tmp_path.rglob("*.pt.trace.json"))) == 1
    resumed = run(code, tmp_path, environment, "resume")
    assert resumed["losses"] == pytest.approx(plain[6:], rel=0.05)
