"""A small notebook with each kind of output that the site shows in another way than Jupyter does."""

import copy
from pathlib import Path

import nbformat
from nbformat import v4

from helpers import config
from helpers.lessons import execute

PIXEL = (  # a PNG file of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
FIGURE = f'<img alt="A bar for each of three loaders" src="data:image/png;base64,{PIXEL}">'
FRAME = '<p>Open TensorBoard</p><iframe src="http://127.0.0.1:1/#pytorch_profiler" title="TensorBoard"></iframe>'
STYLE = "<style scoped>\n.dataframe {}\n</style>"
TABLE = f'<div>\n{STYLE}\n<table border="1" class="dataframe"><tr><td>7</td></tr></table></div>'
SOURCE = '<style>pre { color: #000 }</style><div class="highlight"><pre><span class="nb">echo</span> /tmp\n</pre></div>'
BAR = "steps:   0%|          | 0/2 [00:00<?, ?it/s]\rsteps: 100%|██████████| 2/2 [00:01<00:00,  1.90it/s]\n"


def _cell(source: str, *outputs: nbformat.NotebookNode, **metadata) -> nbformat.NotebookNode:
    return v4.new_code_cell(source, outputs=list(outputs), metadata=metadata, execution_count=1)


def _shown(**data: str) -> nbformat.NotebookNode:
    return v4.new_output("display_data", {kind.replace("_", "/"): text for kind, text in data.items()})


EVERYTHING = v4.new_notebook(
    cells=[
        v4.new_markdown_cell(
            "# 99 · Everything\n\nSee [the recipes](recipes.py) and the [README](../README.md#start)."
        ),
        _cell(
            "measure()", v4.new_output("stream", text=f"{BAR}traces are in {config.PROJECT / 'runs' / 'everything'}\n")
        ),
        _cell("figures.bars()", _shown(text_html=FIGURE, text_plain="Picture()")),
        _cell("table", _shown(text_html=TABLE, text_plain="7")),
        _cell("tensorboard.show('runs')", _shown(text_html=FRAME, text_plain="<HTML>")),
        _cell("source_of(f)", _shown(text_html=SOURCE, text_latex="\\PY", text_plain="echo")),
        _cell("1 + 2", _shown(text_plain="3"), tags=["solution"], jupyter={"source_hidden": True}),
    ],
    metadata={"language_info": {"name": "python"}},
)


def write_everything(path: Path, **course: str) -> Path:
    """Write the notebook without its outputs, keep it with them as `execute.run` does, and return its path."""
    executed = copy.deepcopy(EVERYTHING)
    executed.metadata["course"] = {
        "machine": "Device: CPU. Cores: 2.",
        "processor": "AMD EPYC",
        "preset": config.preset().name,
        "images": "drawn images",
        "date": "2026-11-23",
    } | course
    execute.pages().mkdir(parents=True, exist_ok=True)
    nbformat.write(executed, execute.pages() / path.name)
    for cell in executed.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    del executed.metadata["course"]
    nbformat.write(executed, path)
    return path
