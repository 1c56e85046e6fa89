"""Run a notebook's experiment with a control that must fail, with several seeds: the notebook's own cells.

As a script: ``python -m support.seeds NOTEBOOK SEED…`` prints a line of JSON for each assertion and seed.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat

SETUP, EXPERIMENT = "experiment-setup", "experiment"  # tags: cells run once; cells run with each seed


def cells(notebook: Path, tag: str) -> list[str]:
    """Return the source of the code cells with this tag."""
    found = nbformat.read(notebook, 4).cells
    return [cell.source for cell in found if cell.cell_type == "code" and tag in cell.metadata.get("tags", [])]


def margins(notebook: Path, seeds: list[int], environment: dict[str, str]) -> list[dict]:
    """Run a notebook's experiment with each seed, in a process of its own.

    Returns
    -------
    list of dict
        For each seed and each assertion of the form ``smaller < larger``: ``seed``, ``smaller`` and ``larger`` as it
        stands in the cell, and ``margin``, the one divided by the other, which is below 1 if the assertion holds.
    """
    done = subprocess.run(
        [sys.executable, "-m", "support.seeds", str(notebook), *map(str, seeds)],
        env=environment | {"PYTHONPATH": str(Path(__file__).parent.parent), "MPLBACKEND": "agg"},
        cwd=notebook.parent,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seed"')]


class _Compared(ast.NodeTransformer):
    """Turn ``assert smaller < larger`` into a call that notes both."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        test = node.test
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Lt)):
            return node
        texts = [ast.Constant(ast.unparse(each)) for each in (test.left, test.comparators[0])]
        call = ast.Call(ast.Name("note", ast.Load()), [test.left, test.comparators[0], *texts], [])
        return ast.copy_location(ast.Expr(call), node)


def _run(notebook: Path, seeds: list[int]) -> Iterator[dict]:
    from helpers import config

    found: list[dict] = []
    names = {"__name__": "__main__", "display": lambda *_: None}

    def note(left: float, right: float, smaller: str, larger: str) -> None:
        found.append({"seed": config.SEED, "smaller": smaller, "larger": larger, "margin": float(left / right)})

    names["note"] = note
    for tag, each in ((SETUP, [config.SEED]), (EXPERIMENT, seeds)):
        for seed in each:
            config.SEED = seed
            for source in cells(notebook, tag):
                tree = ast.fix_missing_locations(_Compared().visit(ast.parse(source)))
                exec(compile(tree, f"{notebook.name}, {tag}", "exec"), names)
            yield from found
            found.clear()


if __name__ == "__main__":
    for each in _run(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]]):
        print(json.dumps(each), flush=True)
