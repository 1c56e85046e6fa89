"""The source of what the course uses, shown in a notebook."""

import inspect

from IPython.display import Code


def source_of(*objects: object) -> Code:
    """Return the source of functions, methods, classes or modules below each other, coloured in a notebook.

    Raises
    ------
    TypeError
        For what has no source in Python, such as a built-in function.
    OSError
        If the source cannot be found, such as that of a class that was defined in an interpreter.
    """
    return Code("\n".join(map(inspect.getsource, objects)), language="python")
