"""Public modules and classes show the names that the reference documents, and none of their internals."""

import ast
import importlib
import importlib.util
import inspect
import pickle
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import penstock as ps
from docs.reference.render import MARKED, rendered
from penstock import asgi, cluster, consume, data, devices, engine, extension, serving, telemetry, testing
from penstock.testing import faults
from tests.devices.processes import run_program
from tests.docs.snippets import blocks_of

PAGES = sorted((Path(__file__).parents[2] / "docs/reference").glob("*.md"))
# Each public name in the reference, with its documented members.
DOCUMENTED = {found["name"]: found["members"] for page in PAGES for found in MARKED.finditer(page.read_text())}

MODULES = [ps, engine, asgi, cluster, consume, data, devices, extension, serving, telemetry, testing, faults]
NAMES = [f"{module.__name__}.{name}" for module in MODULES for name in dir(module) if not name.startswith("_")]
OBJECTS: dict[str, Any] = {name: getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])
                           for name in NAMES}  # fmt: skip
FUNCTIONS = {name: value for name, value in OBJECTS.items() if inspect.isfunction(value)}
CLASSES: dict[str, Any] = {name: value for name, value in OBJECTS.items() if inspect.isclass(value)}

# Classes whose private attributes have circular annotations.
NO_HINTS = {"penstock.Ref"}


def is_ours(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] == "penstock"


def functions_of(kind: type) -> Iterator[FunctionType]:
    """Yields the functions that a class itself defines, also functions of properties and class methods."""
    for member in vars(kind).values():
        function = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
        if isinstance(function, FunctionType) and inspect.unwrap(function).__code__.co_filename != "<string>":
            yield function


def assigned_in(function: FunctionType) -> set[str]:
    """Returns the attributes of `self` that a method assigns."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def shown_by(kind: type) -> set[str]:
    """Returns the names that `dir()` of an instance shows, without names of foreign bases such as `Exception`."""
    ours = [base for base in kind.__mro__ if is_ours(base)]
    names = set(dir(kind))
    for base in ours:
        names |= inspect.get_annotations(base).keys() if not typing.is_typeddict(base) else set()
        names |= {name for function in functions_of(base) for name in assigned_in(function)}
    names -= {name for base in kind.__mro__ if base not in ours for name in dir(base)}
    return {name for name in names if not name.startswith("_")}


def section(kind: type, title: str) -> set[str]:
    """Returns the names under "Attributes:" or "Args:" in the docstring of a class."""
    text = (inspect.getdoc(kind) or "").partition(f"{title}:\n")[2].partition("\n\n")[0]
    return set(re.findall(r"^    (\w+): ", text, re.MULTILINE))


def members_in_the_reference(name: str) -> set[str]:
    """Returns the members that the reference lists for a class."""
    return set((DOCUMENTED[name] or "").split(", ")) - {""}


def used_in_examples(page: Path) -> set[str]:
    """Returns the names that the Python snippets of a page use from imported modules, and their parent names."""
    modules: dict[str, str] = {}
    used: set[str] = set()
    for node in [node for block in blocks_of(page.read_text()) if block.language == "python"
                 for node in ast.walk(ast.parse(block.text))]:  # fmt: skip
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            modules |= {name.asname or name.name: prefix + name.name for name in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            name, _, rest = ast.unparse(node).partition(".")
            used |= {modules.get(name, ""), f"{modules.get(name, '')}.{rest}"}
    return used


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_public_name_is_used_by_an_example_on_its_page(page: Path) -> None:
    documented = {found["name"] for found in MARKED.finditer(page.read_text())}
    assert documented - used_in_examples(page) == set()  # tests/docs runs the examples


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_reference_says_what_the_docstrings_say(page: Path) -> None:
    assert page.read_text() == rendered(page.read_text()), "write it anew: python docs/reference/render.py"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_public_module_shows_what_is_documented_and_no_more(module: ModuleType) -> None:
    prefix = f"{module.__name__}."
    inside = {name.removeprefix(prefix).partition(".")[0] for name in DOCUMENTED if name.startswith(prefix)}
    assert {name for name in dir(module) if not name.startswith("_")} == inside
    assert set(module.__all__) == inside  # used by `from ... import *` and type checkers
    assert {name for name in dir(module) if name.startswith("_")} >= {"__doc__", "__file__", "__name__"}


def test_a_public_class_shows_what_is_documented_and_no_more() -> None:
    for name, kind in CLASSES.items():
        required, allowed = set[str](), set[str]()
        for base in kind.__mro__:
            known = f"{base.__module__}.{base.__qualname__}"
            if known in DOCUMENTED:
                required |= members_in_the_reference(known)
                allowed |= section(base, "Args")  # a dataclass shows its arguments, other classes need not
            required |= section(base, "Attributes") if is_ours(base) else set()
        foreign = {name for base in kind.__mro__ if not is_ours(base) for name in dir(base)}
        shown = shown_by(kind)
        assert shown - required - allowed == set(), name
        assert required - foreign - shown == set(), name


def test_what_a_class_shows_is_found() -> None:
    class Base(OSError):
        annotated: int
        _private: int

    Base.__module__ = "penstock"

    class Shown(Base):
        __slots__ = ("slot",)

        def __init__(self) -> None:
            self.assigned, self._hidden = 1, 2

        @property
        def computed(self) -> int:
            self.inside = 1
            return 1

    Shown.__module__ = "penstock"
    assert shown_by(Shown) == {"annotated", "slot", "assigned", "computed", "inside"}


def test_what_is_public_and_what_a_public_class_shows_has_a_docstring() -> None:
    assert [name for name, value in (CLASSES | FUNCTIONS).items() if not value.__doc__] == []
    assert [module for module in MODULES if not module.__doc__] == []
    for name, kind in CLASSES.items():
        members = members_in_the_reference(name) - section(kind, "Attributes")
        assert [member for member in members if not inspect.getdoc(inspect.getattr_static(kind, member))] == [], name


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (ps.Inbox, {"get", "take_nowait"}),
        (ps.Work, {"cancelled", "settled", "on_cancelled", "finish", "fail"}),
        (ps.StreamWork, {"cancelled", "settled", "on_cancelled", "put_nowait", "room", "wait_room", "finish", "fail"}),
    ],
)
def test_authors_of_loops_see_their_side_and_not_that_of_the_engine(kind: type, members: set[str]) -> None:
    assert {member for member in dir(kind) if not member.startswith("_")} == members
    assert inspect.isabstract(kind)  # only the engine makes instances


def test_a_public_object_says_that_it_lives_where_people_import_it() -> None:
    for name, value in (CLASSES | FUNCTIONS).items():
        assert f"{value.__module__}.{value.__qualname__}" == name
        assert pickle.loads(pickle.dumps(value)) is value, name
        if inspect.isclass(value):
            methods = [member for member in vars(value).values() if isinstance(member, FunctionType)]
            own = [method for method in methods if method.__qualname__.startswith(f"{value.__qualname__}.")]
            modules = {method.__module__ for method in own} - {"collections"}  # defines the methods of a NamedTuple
            assert modules <= {name.rpartition(".")[0]}, name  # the module that `help` of a method shows


def test_annotations_and_sources_of_public_functions_are_found() -> None:
    for name, function in FUNCTIONS.items():
        typing.get_type_hints(function)
        assert f"def {function.__name__}(" in inspect.getsource(function), name
    for name, kind in CLASSES.items():
        if name not in NO_HINTS:
            typing.get_type_hints(kind)
        for function in functions_of(kind):
            # Classes that only the engine makes may have arguments whose types are imported for type checkers only.
            if not function.__name__.startswith("_") or (function.__name__ == "__init__" and section(kind, "Args")):
                typing.get_type_hints(function)
                assert inspect.getsource(function), name


LATE = """
import typing
import penstock as ps
print(type(ps.engine.Engine().deploy(ps.graph(ps.node(name="a")(abs)))))
print(typing.get_type_hints(ps.engine.Engine.deploy)["return"])
print(type(ps.device_node(abs)))
ps.telemetry.profile; import penstock.insight.verdict as verdict; print(verdict.Prediction)
"""


def test_a_late_class_that_nobody_named_says_where_it_lives() -> None:
    assert run_program(LATE).splitlines() == [
        "<class 'penstock.engine.Service'>",
        "penstock.engine.Service[~P, ~R]",
        "<class 'penstock.DeviceNode'>",
        "<class 'penstock.telemetry.Prediction'>",
    ]


def test_no_module_has_the_name_of_something_else() -> None:
    # Importing such a module would replace the class or function by the module, and the reference would show the
    # module.
    for name in CLASSES | FUNCTIONS:
        module = OBJECTS.get(name.rpartition(".")[0], ps)
        assert not hasattr(module, "__path__") or importlib.util.find_spec(name) is None, name
