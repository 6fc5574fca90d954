"""The public names of a package: their `__module__` is the package, and some are imported when they are first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import resolve_name
from types import FunctionType, ModuleType
from typing import Any


def public(package: str, late: Mapping[str, str] | None = None) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the names in `__all__` of a package its public ones; to be called at the end of its `__init__.py`.

    Completion and `dir()` show these names and no others. Each class and function among them gets the package as its
    `__module__`, so that reprs, `help`, tracebacks and pickles name the place that people import it from.

    Args:
        package: the name of the package.
        late: names that most programs do not need, and that are imported when they are first used. By the module that
            defines the names, the names with a space between two; or the name of the module itself. The module is
            relative to the package, as `from` writes it ("..advice.fitting" stands beside the package).

    Returns:
        The `__getattr__` and the `__dir__` of the package, which Python asks for these names (PEP 562).
    """
    module = sys.modules[package]
    modules = {name: place for place, names in (late or {}).items() for name in names.split()}
    for name in module.__all__:
        if name not in modules:
            _move(vars(module)[name], package)

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import_module(modules[name], package)
        for late_name, place in modules.items():  # that import may have loaded the modules of other late names as well
            found = sys.modules.get(resolve_name(place, package))
            is_module = place == f".{late_name}"
            if found is not None and (is_module or late_name in vars(found)):  # not while that module is half imported
                value = found if is_module else vars(found)[late_name]
                _move(value, package)
                setattr(module, late_name, value)
        return vars(module)[name]

    def names() -> list[str]:
        return [*module.__all__, *(name for name in vars(module) if name.startswith("__"))]

    return get, names


def _move(value: object, package: str) -> None:
    if not isinstance(value, type | FunctionType) or not value.__module__.startswith("penstock."):
        return
    if isinstance(value, type):
        for member in vars(value).values():
            if isinstance(member, FunctionType) and member.__module__ == value.__module__:
                member.__module__ = package
    value.__module__ = package


class LateModule(ModuleType):
    """A stand-in for a module, which imports the module when one of its names is first used.

    It serves annotations in quotes: `typing.get_type_hints` finds the module under its name, although the file with
    the annotation does not import it.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)
