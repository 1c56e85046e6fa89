"""Runs every benchmark of the course's own code: ``make bench``. Speed is measured here, never asserted in a test."""

import importlib
from pathlib import Path


def main() -> None:
    """Run the ``main`` of every ``bench_*.py`` beside this file."""
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        print(f"\n== {path.stem} ==", flush=True)
        importlib.import_module(f"tests.bench.{path.stem}").main()


if __name__ == "__main__":
    main()
