"""Writes copies of traces corrected as data, for people with a plain TensorBoard.

What is wrong in the plugin itself cannot be corrected in a trace: NCCL's kernels count as computation, the Tensor-Core
kernels of Hopper as others, the Distributed view compares ranks by what they recorded in all, and without internet the
page does not draw. For that, see `helpers.tensorboard`.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import orjson

from helpers import staging
from helpers.tensorboard import data
from helpers.traces import TraceError, files


class InTheWay(RuntimeError):
    """The corrected copies would come between the traces, or replace a file."""


@dataclass(frozen=True)
class Fixed:
    """What `fix` did.

    Attributes
    ----------
    written : tuple of Path
        The corrected copies.
    refused : tuple of TraceError
        Why other traces could not be copied; each names its file.
    """

    written: tuple[Path, ...]
    refused: tuple[TraceError, ...]


def fix(logdir: str | Path, out: str | Path) -> Fixed:
    """Write a corrected copy of every trace in `logdir` into `out`, in folders of the same names, as gzip files.

    Parameters
    ----------
    logdir : str or Path
        Folder of the traces of one or several runs. They stay as they are.
    out : str or Path
        Folder for the copies, outside of `logdir`: TensorBoard would show both.

    Raises
    ------
    NoTraces
        If there are no traces in `logdir`.
    InTheWay
        If `out` lies in `logdir`, or a file of a copy's name is there.
    """
    logdir, out = Path(logdir).resolve(), Path(out).resolve()
    found = [file for run in files.runs(logdir) for file in files.of_run(run)]
    if out.is_relative_to(logdir):
        raise InTheWay(f"The copies would lie in {out}, among the traces in {logdir}. Name a folder outside of it.")
    targets = {file: out / file.relative_to(logdir).with_name(f"{file.name.removesuffix('.gz')}.gz") for file in found}
    for target in targets.values():
        if target.exists():
            raise InTheWay(f"There is a file {target} already. Name another folder, or remove that one.")
    written, refused = [], []
    for file, target in targets.items():
        try:
            trace = files.document(file)
        except TraceError as error:
            refused.append(error)
        else:
            staging.write(target, gzip.compress(orjson.dumps(data.correct(trace)), 6))
            written.append(target)
    return Fixed(tuple(written), tuple(refused))
