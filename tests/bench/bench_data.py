"""How long it takes to draw, write, check and verify 60,000 images: ``python -m tests.bench.bench_data``."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from helpers import config
from helpers.data import cifar10

COUNTS = (50_000, 10_000)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = {"data_dir": Path(folder), "drawn": COUNTS, "download": False, "progress": False}
        prepared = timed("draw and write", lambda: cifar10.prepare(**options))
        timed("check, as every later call does", lambda: cifar10.prepare(**options))
        timed("verify every byte", lambda: cifar10.verify(prepared.train.parent, progress=False))


def timed(name: str, work):
    begin = time.perf_counter()
    result = work()
    print(f"{name}: {time.perf_counter() - begin:.2f} s for {sum(COUNTS):,} images on {config.cores()} cores")
    return result


if __name__ == "__main__":
    main()
