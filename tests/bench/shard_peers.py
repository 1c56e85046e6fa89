"""Other libraries that stream shards from object storage, for `bench_shards` to compare with: the extra ``peers``.

Each is set up as its own documentation advises for training on images from S3. Every run is a process of its own, with
a cache of its own: several of them leave shared memory, locks or threads behind that the next would trip over. A run
gives batches of rows: the image's number, the CRC32 of its bytes, and how many these are. So all of them read all
bytes, and it can be checked that they are the right ones; nobody decodes, which would be the same work for all.

    python -m tests.bench.shard_peers FILE

reads what to do from the file and writes what came of it beside.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from helpers.data import stores

ROOT = Path(__file__).parents[2]
SEED = 1
SEMAPHORES = "shard-peers"
AFRESH = "forkserver"  # for libraries whose workers must not be forks of a process that has read
PATIENCE = 90  # seconds that a run may take; then it hangs


@dataclass(frozen=True)
class Run:
    """What one rank reads.

    Attributes
    ----------
    peer : str
        A name in `PEERS`.
    bucket : stores.Bucket
    prefix : str
        The folder of the data in the bucket, with a slash at its end.
    folder : str
        For the library's cache.
    batch, workers : int
    rank, world : int
    batches : int, optional
        After so many the state is taken, and the process killed; by default the whole epoch is read.
    state : Any
        Of an earlier run, to go on from.
    extra : dict
        What else its `write` has left for the peer, and settings to try.
    """

    peer: str
    bucket: stores.Bucket
    prefix: str
    folder: str
    batch: int
    workers: int
    rank: int = 0
    world: int = 1
    batches: int | None = None
    state: Any = None
    extra: dict = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of a run.

    Attributes
    ----------
    rows : list of ndarray of int64, shape (batch, 3)
        Of each batch: number, CRC32 and size of its images.
    first, seconds : float
        From asking for the first batch until it was there, and until the last.
    state : Any
        After the last batch.
    refused : str
        The error, if the library gave no state.
    """

    rows: list
    first: float
    seconds: float
    state: Any = None
    refused: str = ""

    @property
    def ids(self) -> list[int]:
        return [int(number) for batch in self.rows for number in batch[:, 0]]

    @property
    def bytes(self) -> int:
        return sum(int(batch[:, 2].sum()) for batch in self.rows)


class Failed(RuntimeError):
    """A run ended with an error, or did not end."""


class Wrong(Failed):
    """A library gave an image that is not what was written."""


def row(number: int, content: Any) -> np.ndarray:
    """Return what is kept of an image: its number, the CRC32 of its bytes, and how many these are."""
    return np.array([number, zlib.crc32(content), len(content)])


def stack(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Collate rows to a tensor of int64, shape (batch, 3)."""
    return torch.from_numpy(np.stack(rows))


class Images(Sequence):
    """Images as `shards.pack` wants them: few files, which come again and again under other numbers."""

    def __init__(self, files: Sequence[bytes], count: int):
        self.files, self.count = files, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, bytes]:
        if number >= self.count:
            raise IndexError(number)
        return {"jpg": self.files[number % len(self.files)]}


# -------------------------------------------------------------------------------------------------------------- ours


def write_ours(images: Images, bucket: stores.Bucket, prefix: str, folder: Path, shard_bytes: int) -> dict:
    from helpers.loading import shards

    index = shards.pack(images, bucket.connect(), prefix, shard_bytes=shard_bytes, piece_bytes=shard_bytes / 4)
    return {"index": index.to_json().decode()}


def read_ours(run: Run):
    from helpers.loading import shards

    index = shards.Index.from_json(run.extra["index"].encode())
    stream = shards.ShardStream(
        run.bucket, index, run.batch, _row_of_ours, prefix=run.prefix, seed=SEED, rank=run.rank, world=run.world,
        collate=stack, **run.extra.get("settings", {}),
    )  # fmt: skip
    if run.state:
        stream.load_state(run.state)
    loader = DataLoader(stream, batch_size=None, num_workers=run.workers)
    return loader, stream.state


def _row_of_ours(sample: dict) -> np.ndarray:
    return row(int(sample["__key__"]), sample["jpg"])


# -------------------------------------------------------------------------------------------------------- WebDataset


def sign(bucket: stores.Bucket, prefix: str) -> list[str]:
    """Return an address of each tar file that needs no credentials, as WebDataset wants them for a private bucket."""
    import obstore

    store = bucket.connect()
    names = sorted(entry["path"] for page in store.list(prefix) for entry in page if entry["path"].endswith(".tar"))
    return obstore.sign(store, "GET", names, datetime.timedelta(hours=6))


def read_webdataset(run: Run):
    import webdataset

    settings = {"shardshuffle": 100, "detshuffle": True} | run.extra.get("settings", {})
    batches = settings.pop("epoch", None)
    dataset = webdataset.WebDataset(
        run.extra["urls"], nodesplitter=webdataset.split_by_node, empty_check=False, seed=SEED, **settings
    )
    dataset = dataset.compose(webdataset.detshuffle(1_000, seed=SEED))
    dataset = dataset.map(_row_of_webdataset).batched(run.batch, collation_fn=stack)
    if batches is not None:
        dataset = dataset.with_epoch(batches)
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=run.workers)
    return loader, lambda _: loader.state_dict()


def _row_of_webdataset(sample: dict) -> np.ndarray:
    return row(int(sample["__key__"]), sample["jpg"])


# ------------------------------------------------------------------------------------------------ MosaicML streaming


def write_streaming(images: Images, bucket: stores.Bucket, prefix: str, folder: Path, shard_bytes: int) -> dict:
    import streaming

    columns = {"id": "int", "jpg": "bytes"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=shard_bytes, hashes=["xxh64"]) as shards:
        for number, image in enumerate(images):
            shards.write({"id": number, **image})
    upload(folder, bucket, prefix)
    return {}


def read_streaming(run: Run):
    import streaming

    settings = {"predownload": 64 * run.batch} | run.extra.get("settings", {})
    dataset = streaming.StreamingDataset(
        remote=f"s3://{run.bucket.name}/{run.prefix}", local=run.folder, shuffle=True, shuffle_seed=SEED,
        batch_size=run.batch, num_canonical_nodes=1, **settings,
    )  # fmt: skip
    # Forked workers share the connection over which the index came, and read each other's answers: with "fork", every
    # second run stood still until a time-out, or had a shard with bytes of two. Without TLS nothing notices.
    loader = streaming.StreamingDataLoader(
        dataset, batch_size=run.batch, num_workers=run.workers, collate_fn=_rows_of_dicts,
        multiprocessing_context=AFRESH if run.workers else None,
    )  # fmt: skip
    if run.state:
        loader.load_state_dict(run.state)
    return loader, lambda _: loader.state_dict()


def _rows_of_dicts(samples: list[dict]) -> torch.Tensor:
    return stack([row(sample["id"], sample["jpg"]) for sample in samples])


# ------------------------------------------------------------------------------------------------------------ LitData


def write_litdata(images: Images, bucket: stores.Bucket, prefix: str, folder: Path, shard_bytes: int) -> dict:
    import litdata

    content = _Content(images)
    litdata.optimize(content, list(range(len(images))), str(folder), num_workers=1, chunk_bytes=shard_bytes)
    upload(folder, bucket, prefix)
    return {}


class _Content:
    def __init__(self, images: Images):
        self.images = images

    def __call__(self, number: int) -> dict:
        return {"id": number, **self.images[number]}


def read_litdata(run: Run):
    import litdata
    from litdata.streaming import downloader

    # It downloads with obstore where that is installed, but offers no way to say that the server has no TLS.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    keys = {"aws_access_key_id": run.bucket.access_key, "aws_secret_access_key": run.bucket.secret_key}
    settings = run.extra.get("settings", {})
    dataset = litdata.StreamingDataset(
        f"s3://{run.bucket.name}/{run.prefix}", cache_dir=run.folder, shuffle=True, seed=SEED,
        storage_options=keys | {"endpoint_url": run.bucket.endpoint, "region_name": run.bucket.region},
        transform=_row_of_litdata, **settings,
    )  # fmt: skip
    loader = litdata.StreamingDataLoader(dataset, batch_size=run.batch, num_workers=run.workers, collate_fn=stack)
    if run.state:
        loader.load_state_dict(run.state)
    return loader, lambda _: loader.state_dict()


def _row_of_litdata(sample: dict) -> np.ndarray:
    return row(sample["id"], sample["jpg"])


# ------------------------------------------------------------------------------------------------------------ LanceDB


def write_lancedb(images: Images, bucket: stores.Bucket, prefix: str, folder: Path, shard_bytes: int) -> dict:
    import pyarrow as pa

    schema = pa.schema({"id": pa.int64(), "jpg": pa.large_binary()})

    def batches() -> Iterator[pa.RecordBatch]:
        for begin in range(0, len(images), 256):
            numbers = range(begin, min(begin + 256, len(images)))
            yield pa.record_batch([list(numbers), [images[number]["jpg"] for number in numbers]], schema=schema)

    _lance(bucket, prefix).create_table("images", batches(), schema=schema)
    return {}


def _lance(bucket: stores.Bucket, prefix: str):
    import lancedb

    options = {
        "endpoint": bucket.endpoint, "allow_http": "true", "region": bucket.region,
        "access_key_id": bucket.access_key, "secret_access_key": bucket.secret_key,
    }  # fmt: skip
    return lancedb.connect(f"s3://{bucket.name}/{prefix.rstrip('/')}", storage_options=options)


def read_lancedb(run: Run):
    from lancedb import streaming

    settings = {"num_splits": 12, "shuffle_clump_size": 64} | run.extra.get("settings", {})
    dataset = streaming.StreamingDataset(
        _lance(run.bucket, run.prefix).open_table("images"), shuffle_seed=SEED, rank=run.rank, world_size=run.world,
        transform=_rows_of_lancedb, **settings,
    )  # fmt: skip
    if run.state:
        dataset.load_state_dict(dataset.merge_state_dicts(run.state) if isinstance(run.state, list) else run.state)
    loader = streaming.StreamingDataLoader(
        dataset, batch_size=run.batch, num_workers=run.workers, collate_fn=stack,
        multiprocessing_context=AFRESH if run.workers else None,
    )  # fmt: skip
    return loader, lambda _: dataset.state_dict()


def _rows_of_lancedb(batch) -> list[np.ndarray]:
    numbers, contents = batch.column("id").to_pylist(), batch.column("jpg")
    return [row(number, contents[i].as_buffer()) for i, number in enumerate(numbers)]


# --------------------------------------------------------------------------------------------- the limit: no loader


def read_plain(run: Run):
    """Ranges of equal size from threads, in no order and to nowhere: as fast as this machine, server and link are."""
    from concurrent.futures import ThreadPoolExecutor

    from helpers.loading import shards

    index = shards.Index.from_json(run.extra["index"].encode())
    store = run.bucket.connect()

    def fetch(piece) -> torch.Tensor:
        content = store.get_range(run.prefix + piece.shard, start=piece.start, end=piece.end)
        return torch.tensor([[piece.start, 0, len(content)]])

    pool = ThreadPoolExecutor(run.extra.get("settings", {}).get("threads", 16))
    return pool.map(fetch, index.pieces), lambda _: None


# --------------------------------------------------------------------------------------------------------------- all


def upload(folder: Path, bucket: stores.Bucket, prefix: str) -> None:
    """Put the files of a folder into a bucket."""
    store = bucket.connect()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put(f"{prefix}{path.relative_to(folder).as_posix()}", path)


@dataclass(frozen=True)
class Peer:
    """A library that streams from object storage.

    Attributes
    ----------
    package : str
        What to install.
    write : callable, optional
        Takes images, bucket, prefix, a folder and the size of a shard; returns what `read` needs to know. Without it,
        the peer reads what ours has written.
    read : callable
        Takes a `Run`; returns an iterable of batches, and a function that takes the number of batches that were read
        and returns a state to go on from.
    afresh : str, optional
        The module that its workers import, if they are no forks.
    """

    package: str
    read: Callable[[Run], tuple[Iterable, Callable[[int], Any]]]
    write: Callable | None = None
    afresh: str | None = None


PEERS = {
    "webdataset": Peer("webdataset", read_webdataset),
    "streaming": Peer("mosaicml-streaming", read_streaming, write_streaming, "streaming"),
    "litdata": Peer("litdata", read_litdata, write_litdata),
    "lancedb": Peer("lancedb", read_lancedb, write_lancedb, "lancedb.streaming"),
    "ours": Peer("obstore", read_ours, write_ours),
    "plain": Peer("obstore", read_plain),
}


class Ranks:
    """Runs of all ranks of a world, each in a process of its own, at the same time."""

    def __init__(self, runs: Sequence[Run]):
        self.folder = Path(runs[0].folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        self.processes = [self._start(run, port) for run in runs]

    def _start(self, run: Run, port: int) -> subprocess.Popen:
        order = self.folder / f"rank-{run.rank}.pickle"
        order.write_bytes(pickle.dumps(run))
        bucket = run.bucket
        environment = os.environ | {
            "AWS_ACCESS_KEY_ID": bucket.access_key, "AWS_SECRET_ACCESS_KEY": bucket.secret_key,
            "AWS_DEFAULT_REGION": bucket.region, "S3_ENDPOINT_URL": bucket.endpoint,
            "RANK": str(run.rank), "WORLD_SIZE": str(run.world),
            "LOCAL_RANK": str(run.rank), "LOCAL_WORLD_SIZE": str(run.world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        with open(order.with_suffix(".log"), "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", __name__, str(order)],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def outcomes(self, patience: float = PATIENCE) -> list[Outcome]:
        """Wait for all, and return what came of them; what a rank has started ends with it.

        Parameters
        ----------
        patience : float
            Seconds until a run counts as one that hangs.

        Raises
        ------
        Failed
            If one ended with an error, with the last line that it printed, or did not end.
        """
        until = time.monotonic() + patience
        try:
            for process in self.processes:
                process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            raise Failed(f"no end after {patience:g} s; {self._said()}") from None
        finally:
            self.kill()
        found = []
        for rank in range(len(self.processes)):
            path = self.folder / f"rank-{rank}.outcome"
            if not path.exists():
                raise Failed(self._said(rank))
            found.append(pickle.loads(path.read_bytes()))
            path.unlink()
        return found

    def _said(self, rank: int = 0) -> str:
        """The last line that a rank has printed which looks like an error."""
        lines = (self.folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines() or [
            "it said nothing"
        ]
        return next(
            (line.strip() for line in reversed(lines) if re.search(r"\w(Error|Exception)\b|: ", line)), lines[-1]
        )

    def kill(self) -> None:
        """Kill the processes with all that they have started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main() -> None:
    """Do what the file says that is named on the command line."""
    threading.Thread(target=lambda: (os.read(0, 1), os.killpg(0, signal.SIGKILL)), daemon=True).start()  # as its parent
    multiprocessing.current_process()._config["semprefix"] = f"/{SEMAPHORES}"  # so that what a kill leaves is known
    order = Path(sys.argv[1])
    run: Run = pickle.loads(order.read_bytes())
    if run.world > 1:
        torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    cache = Path(run.folder) / "cache"
    run = Run(**{**run.__dict__, "folder": str(cache)})
    if PEERS[run.peer].afresh and run.workers:  # let them find everything imported, as forks do
        multiprocessing.set_forkserver_preload([PEERS[run.peer].afresh, __spec__.name])
        process = multiprocessing.get_context(AFRESH).Process(target=_free_port)
        process.start()
        process.join()
    batches, state = PEERS[run.peer].read(run)
    rows, first, begin = [], None, time.perf_counter()
    for batch in batches:
        if first is None:
            first = time.perf_counter() - begin
        rows.append(batch.numpy().copy())
        if len(rows) == run.batches:
            break
    seconds = time.perf_counter() - begin
    outcome = Outcome(rows, first or 0.0, seconds)
    if run.batches is not None:
        try:
            outcome.state = state(len(rows))
        except Exception as error:
            outcome.refused = f"{type(error).__name__}: {error}"
    staged = order.with_suffix(".staged")
    staged.write_bytes(pickle.dumps(outcome))
    staged.rename(order.with_suffix(".outcome"))
    if run.batches is not None:
        os.killpg(0, signal.SIGKILL)  # an interruption, as the end of a job's time is one


if __name__ == "__main__":
    from tests.bench import shard_peers  # what it pickles must not be of __main__

    shard_peers.main()
