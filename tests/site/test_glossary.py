"""The glossary, which notebooks explain, and the pages of the toolbox, which docstrings explain."""

import inspect
import re

import nbformat
import pytest
from nbformat import v4

from helpers.lessons import execute
from helpers.lessons.site import api, glossary
from helpers.lessons.site.glossary import Term

FIRST_USED = ["host", "device", "kernel", "launch", "operator", "stream", "synchronize", "page cache", "pinned memory"]
FIRST_USED += ["latency", "throughput", "nat", "GFLOP", "Tensor Core", "SM"]


@pytest.fixture
def notebook(tmp_path):
    """Writes a notebook of one cell of text, and returns its path."""

    def write(text, name="05-photos.ipynb"):
        nbformat.write(v4.new_notebook(cells=[v4.new_markdown_cell(text)]), tmp_path / name)
        return tmp_path / name

    return write


def entry(text):
    """What the only entry of a glossary says, without its link."""
    explanation = re.search(r"^  (.*)$", text, re.MULTILINE)[1]
    return explanation.rpartition(" [")[0]


@pytest.mark.parametrize(
    ("text", "term", "expected"),
    [
        ("We load. A **shard** is a file. It is large.", Term("shard", "05"), "A **shard** is a file."),
        ("Many: **Shards**. Few.", Term("shard", "05"), "Many: **Shards**."),
        (
            "A **shard** is a file. It is large. So?",
            Term("shard", "05", sentences=2),
            "A **shard** is a file. It is large.",
        ),
        ("So. (A **nat** is a unit of 1.4 bits.) Now.", Term("nat", "05"), "A **nat** is a unit of 1.4 bits."),
        ("- one\n- **GPU**: is it on? No.\n- two", Term("GPU", "05"), "**GPU**: is it on?"),
        ("2. A *list*, the **buffer**, waits:\n\n3. more", Term("buffer", "05"), "A *list*, the **buffer**, waits."),
        (
            "Here `a.b` is **pickled** (see 03).",
            Term("pickle", "05", ("pickled",)),
            "Here `a.b` is **pickled** (see 03).",
        ),
        ("```\n**shard** code.\n```\n\nA **shard**.", Term("shard", "05"), "A **shard**."),
        ("A **shard**: [03](03-more.ipynb).", Term("shard", "05"), "A **shard**: [03](notebooks/03-more.ipynb)."),
    ],
)
def test_an_entry_is_the_sentence_with_the_bold_term(notebook, text, term, expected):
    assert entry(glossary.markdown([notebook(f"# 05 · Photos\n\n{text}")], [term])) == expected


def test_an_entry_links_the_section_that_explains_it_and_the_other_notebooks(notebook):
    first = notebook("# 03 · Queues\n\nA **stream**.", "03-queues.ipynb")
    second = notebook("# 05 · Photos\n\n## Why `two` queues?\n\nA **stream** is a queue.")
    text = glossary.markdown([first, second], [Term("stream", "05", ("queue",))])
    assert "\nstream\nqueue\n  A **stream** is a queue. " in text
    assert "[05 · Photos](notebooks/05-photos.ipynb#why-two-queues), [03](notebooks/03-queues.ipynb)\n" in text


def test_a_term_that_its_notebook_does_not_explain_is_an_error_that_names_both(notebook):
    path = notebook("# 05 · Photos\n\nA **stream**, and a shard.")
    with pytest.raises(glossary.UnexplainedTerm, match=r"\*\*shard\*\* in a notebook 05-.*found it in no notebook"):
        glossary.markdown([path], [Term("shard", "05")])
    with pytest.raises(glossary.UnexplainedTerm, match=r"in a notebook 08-.*found it in 05-photos\.ipynb"):
        glossary.markdown([path], [Term("stream", "08")])


def test_the_course_explains_all_terms_and_says_no_other_form_twice():
    text = glossary.markdown(execute.all_notebooks())
    words = [word.casefold() for term in glossary.TERMS for word in (term.name, *term.forms)]
    assert sorted(set(words)) == sorted(words)
    listed = re.findall(r"^([^\s`#][^\n]*)$", text.partition("{glossary}\n")[2], re.MULTILINE)
    assert {word.casefold() for word in listed} == set(words)
    assert set(FIRST_USED) <= {term.name for term in glossary.TERMS}


@pytest.mark.processes
def test_each_term_has_an_anchor_on_the_page(built_site):
    page = (built_site / "glossary.html").read_text(encoding="utf-8")
    anchors = re.findall(r'<dt id="term-([^"]*)"', page)
    assert len(anchors) == len(set(anchors)) == sum(1 + len(term.forms) for term in glossary.TERMS)


# -------------------------------------------------------------------------------------------------------- the toolbox


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("helpers.timing", {"loop", "interleaved", "Comparison", "WorkerDied"}),
        ("helpers.timing.profiling", {"record", "stopwatch"}),
        ("helpers.traces", {"load", "breakdown", "Trace", "TraceError"}),
        ("helpers.tensorboard", {"show", "stop", "TensorBoardFailed"}),
    ],
)
def test_what_a_module_offers_is_public_and_nothing_else(module, names):
    public = api.public(module)
    assert names <= public.keys()
    assert [name for name in public if name.startswith("_")] == []
    assert {"Path", "dataclass", "quote", "CATEGORIES"} & public.keys() == set()


@pytest.mark.parametrize("module", api.MODULES)
def test_everything_public_has_a_docstring(module):
    assert [name for name, it in api.public(module).items() if not inspect.getdoc(it)] == []


def test_pages_that_are_written_name_everything_public(tmp_path):
    api.write(tmp_path)
    index = (tmp_path / "api" / "index.md").read_text(encoding="utf-8")
    assert "PYTHONPATH" in index and "## " not in index
    for module in api.MODULES:
        assert f"{{doc}}`{module}`: " in index
        page = (tmp_path / "api" / f"{module}.rst").read_text(encoding="utf-8")
        directives = re.findall(r"^\.\. auto(?:function|class|exception):: (.*)$", page, re.MULTILINE)
        assert sorted(directives) == sorted(f"{module}.{name}" for name in api.public(module))


def test_without_the_section_on_how_to_use_it_there_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "USAGE", "## Elsewhere\n")
    with pytest.raises(LookupError, match=r"Expected the section '## Elsewhere' in .*toolbox\.md"):
        api.write(tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize("module", api.MODULES)
def test_a_page_shows_each_docstring_once(built_site, module):
    page = (built_site / "api" / f"{module}.html").read_text(encoding="utf-8")
    for name in api.public(module):
        assert page.count(f'id="{module}.{name}"') == 1, name
    assert 'class="field-list' in page and "------" not in page
