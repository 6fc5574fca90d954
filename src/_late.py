"""Names that a package imports when they are first used: `import penstock` is for all, and few use every part of it."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package, by which Python finds such names (PEP 562).

    Args:
        package: the name of the package.
        modules: for each name the module that has it, or that it is; relative to the package.
    """

    def get(name: str) -> Any:
        if name == "__all__":  # what `from ... import *` asks for: the late names as well
            return [one for one in names() if not one.startswith("_") and one != "TYPE_CHECKING"]
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(modules[name], package)
        value = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names
