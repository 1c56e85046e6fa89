"""Tests of training loops in Jupyter notebooks: run as a script, and in a cell of a real kernel."""

import subprocess
import sys

import pytest

nbformat = pytest.importorskip("nbformat")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

CELLS = [
    "%matplotlib inline\nimport sys, time\nimport torch\nfrom torch.utils.data import DataLoader, TensorDataset",
    "",
    "!echo from a shell\n"
    "data = TensorDataset(torch.randn(3200, 8))\n"
    "loader = DataLoader(data, batch_size=32)\n"
    "weights = torch.zeros(8, requires_grad=True)\n"
    "optimizer = torch.optim.SGD([weights], lr=0.01)",
    "%%time\n"
    "def log(loss):\n"
    "    time.sleep(0.01)\n"
    "for (rows,) in loader:\n"
    "    loss = (rows @ weights).mean()\n"
    "    loss.backward()\n"
    "    optimizer.step()\n"
    "    log(loss)\n"
    "weights.sum().item()",
    "print('then', sys.argv[1:], __name__, [*DataLoader(data, 4, num_workers=1)][0][0].shape)",
]
NAMES = "cell 3:8: log(loss)"  # the third cell that is not empty, and its line with the magic


def write(folder, cells=CELLS):
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_markdown_cell("# A title"), *map(nbformat.v4.new_code_cell, cells)]
    nbformat.write(notebook, folder / "train.ipynb")
    return notebook


def stepscope(folder, *arguments):
    command = [sys.executable, "-m", "stepscope", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def test_a_notebook_runs_as_a_script_and_its_cell_and_line_are_named(tmp_path):
    (tmp_path / "inner").mkdir()
    write(tmp_path / "inner")
    ended = stepscope(tmp_path, "run", "inner/train.ipynb", "--epochs", "1")
    assert ended.returncode == 0 and NAMES in ended.stderr, ended.stderr
    assert "from a shell" in ended.stdout
    assert "then ['--epochs', '1'] __main__ torch.Size([4, 8])" in ended.stdout
    assert (tmp_path / "diagnosis").is_dir() and [*(tmp_path / "inner").iterdir()] == [tmp_path / "inner/train.ipynb"]


def test_magics_around_a_cell_are_left_out_and_an_error_ends_the_notebook_with_its_line(tmp_path):
    failing = "\n\nprint('5%%time')\nraise ValueError('line 4')"  # a text that only looks like a magic stays
    write(tmp_path, ["%%capture\n%%time\nprint('captured')", failing, "print('not reached')"])
    ended = stepscope(tmp_path, "run", "train.ipynb")
    assert "captured" in ended.stdout and "5%%time" in ended.stdout and "not reached" not in ended.stdout
    assert ended.returncode == 1
    assert "raise ValueError('line 4')" in ended.stderr and "transform" not in ended.stderr


def test_a_file_that_is_no_notebook_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "train.ipynb").write_text("{}")
    ended = stepscope(tmp_path, "run", "train.ipynb")
    assert ended.returncode == 1 and "expected a notebook" in ended.stderr and "Traceback" not in ended.stderr


def test_the_magic_diagnoses_the_loop_of_its_cell_and_restores_pytorch(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    notebook = write(tmp_path, ["%load_ext stepscope", *(cell.replace("%%time", "%%stepscope") for cell in CELLS)])
    notebook.cells += map(
        nbformat.v4.new_code_cell,
        [
            "%%stepscope --folder other\nlen(loader)", "%%stepscope --stops 3\n1", "DataLoader.__iter__.__module__",
            "In = 3", "%%stepscope\n1 / 0",
        ],
    )  # fmt: skip
    nbclient.NotebookClient(
        notebook, timeout=200, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [str(cell.get("outputs")) for cell in notebook.cells]
    assert NAMES.replace("cell 3", "cell 4") in shown[5] and "<b>Verdict: " in shown[5], shown[5]
    assert "ended before enough of its steps were seen" in shown[7]
    assert "expected --steps N or --folder FOLDER, found" in shown[8]
    assert "torch.utils.data.dataloader" in shown[9]
    assert notebook.cells[11].outputs[-1].output_type == "error"  # so that "Run All" ends here
