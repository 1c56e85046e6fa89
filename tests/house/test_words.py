"""Words that must not come back: each thing has one word here, the one that the field uses."""

import json
import re

import pytest

from helpers import config

# What must not come back, as a pattern, and what to write instead
WORDS = {
    r"\bmini-?batch(es)?\b": "batch",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"pretend": "simulate",
    r"\btimed in turn\b|\bin_turn\b": "interleaved",
    r"\bprocessor (time|seconds)\b": "CPU time",
    r"\blet(s|ting)? go of\b": "release (the GIL), free (memory)",
    r"\bhand(s|ed|ing)? (\S+ ){0,3}over\b": "transfer (from a worker to the main process)",
    r"\bcombs?\b": "periodic stall",
    r"\bwhat binds\b|\bbound by launching\b": "compute-bound, memory-bound, launch-bound, input-bound",
    r"\bin the open\b": "exposed",
    r"\btold\b|(?<!\.)(?<!def\s)\btells?\b(?! (\S+ ){0,2}(apart|from)\b)": "says, shows; recorded, reported, unknown",
    r"\bcannot_tell\b": "unknown",
    r"\baside\b": "staging",
    r"\bstages? of the ladder\b|\bladder's stages?\b": "rung",
}
PATTERNS = {re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE): use for pattern, use in WORDS.items()}

# Where such a word stays, and why
ALLOWED = {
    ("notebooks/01-first-profile.ipynb", "the *mini-batch* of the literature"): "readers meet it elsewhere",
    ("CHANGELOG.md", "`measure.in_turn`"): "what it was called before",
    ("CHANGELOG.md", "`simulate.PretendAccelerator`"): "what it was called before",
    ("helpers/training/models.py", "Accurate, large minibatch SGD"): "the title of a paper",
}

NAMES = ("*.md", "helpers/**/*", "tests/**/*", "notebooks/*", ".github/**/*", "data/reference/*/README.md")
KINDS = (".py", ".js", ".css", ".html", ".md", ".yml", ".ipynb")
FILES = sorted(
    {path for name in NAMES for path in config.PROJECT.glob(name) if path.suffix in KINDS}
    - {config.PROJECT / "tests" / "house" / "test_words.py"}
)


def text_of(path):
    """The text of a file; of a notebook what is in its cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text


def name_of(path):
    return path.relative_to(config.PROJECT).as_posix()


def found(text):
    """What must not come back in a text: its line, the words, and what to write instead."""
    for pattern, use in PATTERNS.items():
        for match in pattern.finditer(text):
            yield f"line {text.count(chr(10), 0, match.start()) + 1}: {match[0]!r} → {use}"


def test_no_word_has_come_back():
    wrong = []
    for path in FILES:
        text = text_of(path)
        for file, allowed in ALLOWED:
            if file == name_of(path):
                text = text.replace(allowed, "")
        wrong += [f"{name_of(path)}, {each}" for each in found(text)]
    assert not wrong, "\n".join(wrong)


def test_notebooks_code_tests_and_prose_are_all_looked_at():
    names = {name_of(path) for path in FILES}
    for kind in ("README.md", "helpers/config.py", "tests/conftest.py", "notebooks/00-start-here.ipynb"):
        assert kind in names


@pytest.mark.parametrize("file, allowed", ALLOWED)
def test_what_is_allowed_is_still_there_once(file, allowed):
    assert text_of(config.PROJECT / file).count(allowed) == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("A Mini-batch of 128", 1),
        ("it mends them, mended", 2),
        ("a worker hands each\n    batch over to", 1),
        ("what\nbinds it", 1),
        ("a PretendAccelerator, and what it tells", 2),
        ("file.tell() and def tell(self) tell one from the other", 0),
        ("we recommend to combine what is at hand. Start over, in the opened file", 0),
    ],
)
def test_a_word_is_found_in_each_of_its_forms_and_in_no_other_word(text, count):
    assert len(list(found(text))) == count
