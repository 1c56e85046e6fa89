"""What all checks share: the form of a wrong answer (case, expected, found), and how it reaches the reader."""

import functools
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

_RIGHT = "found_right"
_Written = TypeVar("_Written", bound=Callable[..., Any])
LIMIT = 120.0  # seconds for a check; the slowest right answer took 2 on two cores busy with tests


class Wrong(Exception):
    """The reader's code is wrong; the message says in which case, what was expected and what was found."""


def expect(right: object, expected: object, found: object, case: str = "", hint: str = "") -> None:
    """Raise `Wrong` unless `right`; the message has the case, what was expected, what was found, and a hint."""
    if not right:
        where = f"{case}: " if case else ""
        raise Wrong(f"{where}expected {expected}, found {found}. {hint}".strip())


def expect_number(found: Any, expected: float, case: str, hint: str, slips: Mapping[str, float]) -> None:
    """Raise `Wrong` unless two numbers agree; explain the mistake if `slips` has it, or else give the hint."""
    expect(isinstance(found, (int, float)), "a number", repr(found), case)
    right = abs(found - expected) <= 1e-6 * abs(expected) + 1e-9
    expect(right, f"{expected:.4g}", f"{found:.4g}", case, slip(found, slips, hint))


def slip(found: ArrayLike, slips: Mapping[str, ArrayLike], otherwise: str = "") -> str:
    """Return the sentence for the mistake that gives `found` (numbers or tensors), or else `otherwise`."""
    alike = {said: value for said, value in slips.items() if np.shape(value) == np.shape(found)}
    return next((said for said, value in alike.items() if np.allclose(found, value, 1e-3)), otherwise)


def answered(check: Callable[..., str]) -> Callable[..., bool]:
    """Make a check, which returns praise or raises `Wrong`, print its answer and return whether the code is right."""

    @functools.wraps(check)
    def answer(*written: object) -> bool:
        try:
            with _limited(LIMIT):
                print(f"Right: {check(*map(expect_written, written))}")
            for each in filter(callable, written):
                with suppress(AttributeError, TypeError):  # a function of a library takes no attributes
                    setattr(each, _RIGHT, True)
            return True
        except Unwritten:
            print("Nothing to check yet: write the code in the cell above, run it, then run this cell again.")
        except Wrong as wrong:
            print(f"Not yet: {wrong}")
        except Exception as error:
            empty = ", as there was no batch left" if isinstance(error.__cause__, StopIteration) else ""
            case = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
            print(f"Not yet: {case}it raised {type(error).__name__}: {error}{empty}{_line_of(error, written)}")
        return False

    return answer


def unless_solved(solution: _Written) -> _Written:
    """Decorate a solution in a notebook: the reader's function or class of its name stays if a check found it right."""
    own: Any = sys._getframe(1).f_globals.get(solution.__name__)
    return own if getattr(own, _RIGHT, False) else solution


@contextmanager
def given(case: str) -> Iterator[None]:
    """Let the message of an error name the case in which it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(case)
        raise


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `Wrong` in the main thread after so many seconds, by an interrupt as from Ctrl-C."""
    late, main = threading.Event(), threading.main_thread().ident

    def interrupt() -> None:
        late.set()
        if main is not None and hasattr(signal, "pthread_kill"):
            signal.pthread_kill(main, signal.SIGINT)  # it also interrupts a blocking call
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


class Unwritten(Exception):
    """The placeholder is still there."""


def _placeholder() -> None: ...


def expect_written(written: Any) -> Any:
    """Return `written`; raise if it is None, `...`, an empty function, a class with one, or a missing file."""
    functions = [each for each in _functions(written) if each.__name__ != "__init__"]
    empty = any(each.__code__.co_code == _placeholder.__code__.co_code for each in functions)
    if written is ... or written is None or empty or (isinstance(written, Path) and not written.exists()):
        raise Unwritten
    return written


def _functions(written: Any) -> list[Callable]:
    functions = vars(written).values() if isinstance(written, type) else [written]
    return [each for each in functions if hasattr(each, "__code__")]


def _line_of(error: Exception, written: tuple) -> str:
    """Return the line of the reader's file or cell that raised the error, "" if it came from elsewhere."""
    functions = [function for each in written for function in _functions(each)]
    files = {*map(str, written), *(function.__code__.co_filename for function in functions)}
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if isinstance(error, SyntaxError) and error.filename in files:
        lines.append(error.lineno)
    return f" (line {lines[-1]} of what you wrote)" if lines else ""


def imported(file: Path) -> ModuleType:
    """Run a file as it is now, as a module that a spawned worker can import, too, and return that."""
    # Not by import, which may use the old compiled file if it changes twice within a second
    module = sys.modules[file.stem] = ModuleType(file.stem)
    module.__file__ = str(file)
    exec(compile(file.read_bytes(), file, "exec"), module.__dict__)
    return module
