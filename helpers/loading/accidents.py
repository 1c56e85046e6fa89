"""Classic accidents with worker processes, made to happen every time. Never write a dataset like this one.

The first comes from opening a file in ``__init__``. Forked workers share such a file's *position*, since they inherited
it: one worker's seek moves the other worker's next read. The system does not say which files cannot be shared so.

The second comes from a library with its own threads: a fork copies the process, but only the thread that forks. The
other threads never answer in the copy.
"""

import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import BrokenBarrierError

import h5py
import numpy as np
from torch.utils.data import DataLoader, Dataset, get_worker_info

_PATIENCE = 10.0  # seconds that a worker waits for the other one
_ORDER = (1, 0, 3, 2)  # two items a worker; no worker begins where the other stops, as it could read on there


class SharedFile(io.FileIO):
    """A file at which two forked workers meet: each waits, after its first seek, until the other has done one, too.

    Without that the accident still happens, but only now and then.
    """

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._meeting, self._met = multiprocessing.get_context("fork").Barrier(2), False

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = super().seek(offset, whence)
        if not self._met and get_worker_info():
            with suppress(BrokenBarrierError):  # the other worker has ended
                self._meeting.wait(_PATIENCE)
            self._met = True
        return position


class Hdf5OpenedTooEarly(Dataset):
    """The images of a packed HDF5 file, opened as a Python file before the workers are forked."""

    def __init__(self, path: str | Path):
        self.images = h5py.File(SharedFile(path))["images"]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.images[index]


def load_with_two_workers(dataset: Dataset) -> np.ndarray:
    """Load items 0 to 3 of a dataset with two forked workers, and return them in the order of their numbers."""
    loader = DataLoader(dataset, 2, sampler=_ORDER, num_workers=2, multiprocessing_context="fork")
    return np.concatenate([np.asarray(batch) for batch in loader])[np.argsort(_ORDER)]


# A process that uses a store, and then starts another process by the given method, which uses a store, too.
_USE_TWICE = """
import multiprocessing, sys, time
import obstore.store

def use(folder, begun=None):
    if begun:
        begun.set()
    store = obstore.store.LocalStore(folder, mkdir=True)
    store.put("object", b"content")
    assert store.get("object").bytes() == b"content"

if __name__ == "__main__":
    use(sys.argv[1])
    time.sleep(0.5)  # until its thread is idle: else, in one of ten cases, the child starts one of its own
    context = multiprocessing.get_context(sys.argv[2])
    begun = context.Event()
    process = context.Process(target=use, args=(sys.argv[1], begun))
    process.start()
    begun.wait(60)
    process.join(5)
    print("answered" if process.exitcode == 0 else "no answer", end="")
    process.kill()
"""


def store_in_a_child(start: str) -> str:
    """Use an object store, start a process by one of multiprocessing's methods, and use a store there, too.

    Returns ``"answered"``, or ``"no answer"`` after 5 seconds. This happens in separate processes, and a child that
    hangs is ended: the caller is safe.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "use_twice.py")
        script.write_text(_USE_TWICE, encoding="utf-8")
        command: list[str | Path] = [sys.executable, "-P", script, Path(folder, "store"), start]
        return subprocess.check_output(command, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
