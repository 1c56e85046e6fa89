"""What the checks share: how a wrong answer is said (case, expected, found), and how it reaches the reader."""

from __future__ import annotations

import functools
import importlib.util
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from torch.utils._python_dispatch import TorchDispatchMode

LIMIT = 120.0  # seconds for a check; beside other tests on two cores the longest right answer took 2


class Wrong(Exception):
    """What was written does something else; the message says in which case, what was expected and what was found."""


def expect(right: bool, expected: object, found: object, case: str = "", hint: str = "") -> None:
    """Raise `Wrong` unless it is right; say what was expected and found, in which case, and why or where to look."""
    if not right:
        where = f"{case}: " if case else ""
        raise Wrong(f"{where}expected {expected}, found {found}. {hint}".strip())


def expect_number(found: object, expected: float, case: str = "", hint: str = "", tolerance: float = 1e-6) -> None:
    """Raise `Wrong` unless a number is as large as expected; `tolerance` is a share of that."""
    expect(isinstance(found, (int, float)), "a number", repr(found), case)
    expect(abs(found - expected) <= tolerance * abs(expected) + 1e-9, f"{expected:.4g}", f"{found:.4g}", case, hint)


def answered(check: Callable[..., str]) -> Callable[..., bool]:
    """Let a check that returns praise, or raises `Wrong`, print its answer and return whether it is right."""

    @functools.wraps(check)
    def answer(written: object, *others: object) -> bool:
        if _unwritten(written):
            print("Nothing to check yet: write the code in the cell above, run it, then run this cell again.")
            return False
        try:
            with _limited(LIMIT):
                praise = check(written, *others)
            print(f"Right: {praise}")
        except Wrong as wrong:
            print(f"Not yet: {wrong}")
            return False
        except Exception as error:
            files = {function.__code__.co_filename for function in _functions(written)}
            print(f"Not yet: it raised {type(error).__name__}: {error}{line_of(error, files)}")
            return False
        return True

    return answer


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `Wrong` after so many seconds: in the main thread, by an interrupt as from the keyboard."""
    late, main = threading.Event(), threading.main_thread().ident

    def interrupt() -> None:
        late.set()
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(main, signal.SIGINT)  # it also ends what the thread waits for
        else:
            signal.raise_signal(signal.SIGINT)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        if not late.is_set():
            raise
        raise Wrong(f"it had not ended after {seconds:g} s. Is there a loop without an end?") from None
    finally:
        timer.cancel()


def _placeholder() -> None: ...


def _unwritten(written: object) -> bool:
    """Whether the placeholder is still there: `...`, a function of it, or a class with a method of it."""
    if written is ... or written is None:
        return True
    functions = [each for each in _functions(written) if each.__name__ != "__init__"]
    return any(each.__code__.co_code == _placeholder.__code__.co_code for each in functions)


def _functions(written: object) -> list[Callable]:
    functions = vars(written).values() if isinstance(written, type) else [written]
    return [each for each in functions if hasattr(each, "__code__")]


def line_of(error: Exception, files: set[str]) -> str:
    """Return where in the reader's files, or cells, an error came from, "" if it came from elsewhere."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if isinstance(error, SyntaxError) and error.filename in files:
        lines.append(error.lineno)
    return f" (line {lines[-1]} of what you wrote)" if lines else ""


def check_file(file: Path, name: str, check: Callable[..., str]) -> bool:
    """Check what a file defines under a name, or say why there is no such thing."""
    if not file.exists():
        print(f"Nothing to check yet: there is no file {file}. Run the cell above, which writes it.")
        return False
    try:
        written = getattr(imported(file), name)
    except Exception as error:
        where = line_of(error, {str(file)})
        print(f"Not yet: no {name} can be imported from {file.name}: {type(error).__name__}: {error}{where}")
        return False
    return answered(check)(written, file)


def imported(file: Path) -> ModuleType:
    """Import a file as it is now, under its own name, so that a worker that is spawned can import it, too."""
    importlib.invalidate_caches()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Operators(TorchDispatchMode):
    """In a ``with`` statement, lists the operators of PyTorch that are called: their names and what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, object]] = []

    def __torch_dispatch__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        result = function(*args, **(kwargs or {}))
        self.calls.append((str(function).split(".")[1], result))
        return result
