"""Two classic accidents with files and worker processes, made to happen every time. Never write a dataset like these.

Both come from opening a file in ``__init__``. The forked workers share such a file's *position* with each other, since
they inherited it: one worker's seek moves the other worker's next read. Which files cannot be shared so, the system
does not say. And where workers are not forked but spawned, the open file must be pickled, which most refuse.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import zipfile
from contextlib import suppress
from pathlib import Path
from threading import BrokenBarrierError

import h5py
import lmdb
import numpy as np
from torch.utils.data import DataLoader, Dataset, get_worker_info

_PATIENCE = 10.0  # seconds that a worker waits for the other one


class SharedFile(io.FileIO):
    """A file of which two forked workers meet: each waits, after its first seek, until the other has sought as well.

    Without that the accident happens all the same, but only now and then.
    """

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._meeting = multiprocessing.get_context("fork").Barrier(2)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = super().seek(offset, whence)
        if self._meeting and get_worker_info():
            with suppress(BrokenBarrierError):  # the other worker has ended
                self._meeting.wait(_PATIENCE)
            self._meeting = None
        return position


class ZipOpenedTooEarly(Dataset):
    """The images of a zip archive that is opened before the workers are forked.

    Parameters
    ----------
    path : path
        An archive that `formats.zipped.pack` made: a member ``00000007.npy`` is an image.
    """

    def __init__(self, path: str | Path):
        self.archive = zipfile.ZipFile(SharedFile(path))
        self.names = sorted(self.archive.namelist())

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.load(io.BytesIO(self.archive.read(self.names[index])))


class Hdf5OpenedTooEarly(Dataset):
    """The images of an HDF5 file that is opened, as a Python file, before the workers are forked.

    Parameters
    ----------
    path : path
        A file that `formats.hdf5.pack` made.
    """

    def __init__(self, path: str | Path):
        self.images = h5py.File(SharedFile(path))["images"]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.images[index]


class LmdbOpenedTooEarly(Dataset):
    """An LMDB file that is opened before the workers are spawned: it cannot be pickled for them.

    Parameters
    ----------
    path : path
        A file that `formats.lmdb.pack` made.
    """

    def __init__(self, path: str | Path):
        self.environment = lmdb.open(str(path), subdir=False, readonly=True, lock=False)

    def __len__(self) -> int:
        return self.environment.stat()["entries"]

    def __getitem__(self, index: int) -> bytes:
        with self.environment.begin() as transaction:
            return transaction.get(index.to_bytes(8, "big") + b"\0")


def load_with_two_workers(dataset: Dataset, start: str = "fork") -> np.ndarray | str:
    """Load the first four items with two workers; return them, or the last line of the error.

    Parameters
    ----------
    dataset : Dataset
        With items 0 to 3.
    start : {"fork", "spawn", "forkserver"}
        How the workers are started.
    """
    loader = DataLoader(dataset, 2, sampler=range(4), num_workers=2, multiprocessing_context=start)
    try:
        return np.concatenate([np.asarray(batch) for batch in loader])
    except Exception as error:  # of any library, and that is what is to be seen
        return str(error).splitlines()[-1]
    finally:
        gc.collect()  # the broken loader, which the next forked workers would inherit and complain of
