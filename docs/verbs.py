"""Shows `penstock.engine.stream` and `plan` as the functions that they are.

Each shares its name with the module that its class is in, and whoever reads the source without running it takes the
module. The function is put beside it as `stream()`, which is how the reference asks for it.
"""

from typing import Any

import griffe


class Verbs(griffe.Extension):
    """Keeps the functions of the engine that a module of the same name would hide."""

    def __init__(self) -> None:
        super().__init__()
        self._functions: list[griffe.Function] = []

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Remember the functions, before the modules come."""
        if func.path in ("penstock.engine.stream", "penstock.engine.plan"):
            self._functions.append(func)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Put them where the reference finds them."""
        for func in self._functions:
            pkg["engine"].members[f"{func.name}()"] = func
