"""The glossary: each term with the sentence by which a notebook explains it, taken from there when the site is built.

A notebook writes a term in bold where it explains it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
from mdit_py_plugins.anchors.index import slugify  # as MyST makes a section's anchor of its heading

PAGE = """# Glossary

Each term, as the notebook explains it in which it matters. The link leads to that section, the numbers to other
notebooks that explain it, too.

```{{glossary}}
{entries}
```
"""

_BETWEEN_SENTENCES = re.compile(r"([.?!][*)]*)\s+(?=[(\[*`\"A-Z])")
_TO_A_NEIGHBOUR = re.compile(r"\]\((?=[\w-]+\.(ipynb|md))")  # a link from one notebook to another


class UnexplainedTerm(LookupError):
    """No notebook explains a term of the glossary."""


@dataclass(frozen=True)
class Term:
    """A term of the glossary.

    Attributes
    ----------
    name : str
    notebook : str
        Number of the notebook with the explanation that also holds outside of it, such as ``"08"``.
    forms : tuple of str
        What else it is called, here or elsewhere. One of these or the name is bold in the notebook.
    sentences : int
        How many sentences the explanation has, from that with the bold words on.
    """

    name: str
    notebook: str
    forms: tuple[str, ...] = ()
    sentences: int = 1


TERMS = (
    Term("95% interval", "01", ("confidence interval",)),
    Term("accelerator", "01"),
    Term("all-reduce", "13"),
    Term("Amdahl's law", "14"),
    Term("asynchronous", "08"),
    Term("augmentation", "07"),
    Term("autocast", "10"),
    Term("batch", "01"),
    Term("bfloat16", "10", ("BF16",)),
    Term("bucket", "13"),
    Term("buffer", "04"),
    Term("channels_last", "09", ("NHWC",)),
    Term("checksum", "06"),
    Term("collate", "02"),
    Term("collective", "13"),
    Term("communication hook", "13"),
    Term("compute-bound", "08"),
    Term("contiguous", "09", ("NCHW",)),
    Term("CUDA graph", "11"),
    Term("data parallel", "13", sentences=2),
    Term("device", "01"),
    Term("device idle", "01", sentences=2),
    Term("DistributedDataParallel", "13", ("DDP",), sentences=3),
    Term("draft mode", "05", sentences=3),
    Term("event", "08"),
    Term("exposed communication", "13", ("exposed",)),
    Term("float16", "10", ("half precision",)),
    Term("float32", "10", ("single precision",)),
    Term("FLOP", "08", ("floating-point operation",)),
    Term("fork", "12", ("forked",)),
    Term("fully sharded data parallel", "13", ("FSDP", "FSDP2")),
    Term("fused", "11"),
    Term("GFLOP", "08", ("TFLOP",)),
    Term("GPU utilization", "01", sentences=2),
    Term("gradient accumulation", "10"),
    Term("gradient scaler", "10", sentences=3),
    Term("graph", "02"),
    Term("HDF5", "06"),
    Term("host", "01"),
    Term("host waits for data", "01", sentences=2),
    Term("input-bound", "01"),
    Term("interleaved", "00"),
    Term("kernel", "01"),
    Term("ladder", "00"),
    Term("latency", "02"),
    Term("launch", "01"),
    Term("launch-bound", "08"),
    Term("LMDB", "06"),
    Term("mantissa", "10"),
    Term("memory format", "09", ("layout",)),
    Term("memory map", "06", ("map",)),
    Term("memory-bound", "08"),
    Term("mixed precision", "10"),
    Term("nat", "01"),
    Term("npy", "06"),
    Term("object store", "12"),
    Term("operator", "01"),
    Term("overlapped communication", "13", ("overlapped",)),
    Term("page cache", "02"),
    Term("periodic stall", "03"),
    Term("pickled", "06"),
    Term("pinned memory", "03", ("page-locked memory",)),
    Term("profiler", "01"),
    Term("PSS", "02", ("proportional set size",)),
    Term("rank", "13"),
    Term("ridge", "08", sentences=2),
    Term("roofline", "08"),
    Term("RSS", "02", ("resident set size",)),
    Term("rung", "00"),
    Term("shard", "12"),
    Term("shuffle buffer", "12"),
    Term("simulated", "01"),
    Term("SM", "01", ("streaming multiprocessor",)),
    Term("SM efficiency", "01"),
    Term("spawn", "03", ("spawned",)),
    Term("stopwatch", "01"),
    Term("straggler", "13"),
    Term("stream", "08", sentences=3),
    Term("stride", "09"),
    Term("strong scaling", "13"),
    Term("synchronize", "08"),
    Term("Tensor Core", "08"),
    Term("TF32", "10"),
    Term("throughput", "00"),
    Term("trace", "01"),
    Term("training step", "01"),
    Term("transfer", "02"),
    Term("weak scaling", "13"),
    Term("worker", "03", sentences=2),
    Term("world", "13"),
)


def markdown(notebooks: Sequence[Path], terms: Sequence[Term] = TERMS) -> str:
    """Return the glossary as a MyST page; its links lead to ``notebooks/NN-name.ipynb`` beside it.

    Parameters
    ----------
    notebooks : sequence of Path
        All notebooks of the course, in reading order.
    terms : sequence of Term, optional

    Raises
    ------
    UnexplainedTerm
        If a term is not bold in the notebook that should explain it.
    """
    texts = {path: _text(path) for path in notebooks}
    entries = [_entry(term, texts) for term in sorted(terms, key=lambda term: term.name.casefold())]
    return PAGE.format(entries="\n\n".join(entries))


def _text(path: Path) -> str:
    """Return what a notebook says in its cells of text, without code."""
    cells = nbformat.read(path, as_version=4).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _entry(term: Term, texts: dict[Path, str]) -> str:
    names = (term.name, *term.forms)
    bold = re.compile(rf"\*\*({'|'.join(map(re.escape, names))})s?[.:]?\*\*", re.IGNORECASE)
    explained = [path for path, text in texts.items() if bold.search(text)]
    path = next((path for path in explained if path.stem.startswith(term.notebook)), None)
    if path is None:
        raise UnexplainedTerm(
            f"Expected {' or '.join(f'**{name}**' for name in names)} in a notebook {term.notebook}-*.ipynb, which "
            f"explains {term.name!r}; found it in {', '.join(path.name for path in explained) or 'no notebook'}. Write "
            "the term in bold where it is explained, or change TERMS in helpers/lessons/site/glossary.py."
        )
    line = next(line for line in texts[path].splitlines() if bold.search(line))
    source = _link(path, texts[path].partition(line)[0])
    others = [f"[{other.stem[:2]}](notebooks/{other.name})" for other in explained if other != path]
    return "\n".join([*names, f"  {_explanation(line, bold, term.sentences)} {', '.join([source, *others])}"])


def _explanation(line: str, bold: re.Pattern[str], count: int) -> str:
    """Return `count` sentences of a paragraph, or of an item of a list, from that with the bold words on."""
    sentences = _BETWEEN_SENTENCES.sub(r"\1\n", re.sub(r"^(- |\d+\. )", "", line)).split("\n")
    first = next(number for number, sentence in enumerate(sentences) if bold.search(sentence))
    text = " ".join(sentences[first : first + count])
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return _TO_A_NEIGHBOUR.sub("](notebooks/", re.sub(":$", ".", text))


def _link(path: Path, before: str) -> str:
    """Link the section of a notebook that begins with the last heading in `before`, the text above the term."""
    title, *sections = re.findall(r"^#+ (.+)$", before, re.MULTILINE)
    anchor = f"#{slugify(sections[-1])}" if sections else ""
    return f"[{title}](notebooks/{path.name}{anchor})"
