"""How a function is named for a worker process, and found there.

A decorated function shadows itself and does not pickle ("not the same object"), so a call travels as
"module:qualname" and the worker imports the module.
"""

import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any


def process_target(fn: Callable[..., Any]) -> str:
    """Return the name, "module:qualname", under which a worker process finds `fn`.

    Args:
        fn: a function of a module, decorated or not. One of the main script works too; the script is imported by each
            worker, so what it starts must stand under `if __name__ == "__main__":`.

    Raises:
        TypeError: a worker cannot find it by name; the message says why and what to do.
    """
    module_name, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if module_name is None or qualname is None:
        raise TypeError(f"{fn!r} has no name that a worker process can import; wrap it in a function of a module")
    target = f"{module_name}:{qualname}"
    if "<lambda>" in qualname:
        raise TypeError(
            f"a lambda ({target}) cannot run in a worker process; make it a function of a module with `def`"
        )
    if "<locals>" in qualname:
        raise TypeError(
            f"{target} is defined inside a function, where a worker process cannot find it; move it to the top level "
            "of its module and pass what it needs as arguments"
        )
    if module_name == "__main__":
        _check_main(target)
    try:
        found = _find(sys.modules[module_name], qualname)
    except (KeyError, AttributeError):
        raise TypeError(f"{target} is not found under that name, so a worker process would not find it") from None
    if unwrap(found) is not fn:
        raise TypeError(
            f"{target} names another object ({found!r}), which is what a worker process would run; "
            "give this function a name of its own at the top level of its module"
        )
    return target


def _check_main(target: str) -> None:
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None or not Path(file).is_file():
        raise TypeError(
            f"{target} exists only in this interactive session or notebook, which a worker process cannot import; "
            'move it to a .py file and import it, or use runs_on="thread"'
        )
    if spec is not None and spec.name.endswith("__main__"):
        raise TypeError(
            f"{target} is defined in a package's __main__.py, which a worker process does not import; "
            "move it to another module of the package"
        )


@cache
def resolve(target: str) -> Callable[..., Any]:
    """Import the function that `process_target` named."""
    module_name, _, qualname = target.partition(":")
    function: Callable[..., Any] = unwrap(_find(importlib.import_module(module_name), qualname))
    return function


def _find(found: Any, qualname: str) -> Any:
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def unwrap(found: Any) -> Any:
    """Return the function behind a node, which keeps it in `fn`; anything else as it is."""
    # Not `inspect.isroutine`: it is true of whatever has `__get__`, as a node does, which may be a method.
    return found if isinstance(found, FunctionType | type) else getattr(found, "fn", found)
