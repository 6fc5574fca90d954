"""The package as a user gets it: names that exist and have docstrings, a light import, and complete files."""

import ast
import pkgutil
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from penstock import data, devices, engine, telemetry, testing
from tests.devices.processes import run_program
from tests.house.counting import code_lines

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


def test_imports_load_neither_jax_nor_the_opentelemetry_sdk() -> None:
    heavy = ["jax", "jaxlib", "numpy", "opentelemetry.sdk", "opentelemetry.exporter", "uvloop"]
    program = "import sys, penstock, penstock.devices, penstock.testing, penstock.telemetry; print(*sys.modules);"
    program += "import penstock.data; print(*sys.modules)"  # which computes with NumPy
    without_data, with_data = (line.split() for line in run_program(program).splitlines())
    assert "penstock.telemetry" in without_data
    assert [name for name in without_data if name.startswith(tuple(heavy))] == []
    heavy.remove("numpy")
    assert [name for name in with_data if name.startswith(tuple(heavy))] == []


# A program that imports penstock, and prints the number of its dataclasses and the modules that it loads.
LOADED = """
import dataclasses, sys
made, dataclass = [], dataclasses.dataclass
def counted(cls=None, /, **options):
    if sys._getframe(1).f_globals["__name__"].startswith("penstock"):
        made.append(cls)
    return dataclass(cls, **options)
dataclasses.dataclass = counted
import anyio, opentelemetry.trace
before, made[:] = set(sys.modules), []
import penstock
print(len(made), *sorted(sys.modules.keys() - before))
"""
# Modules that few programs need, or that programs need only after a run.
LATE = (
    "penstock._cli", "penstock.actors.sampler", "penstock.advice", "penstock.devices", "penstock.engine.drawing",
    "penstock.engine.service", "penstock.insight", "penstock.studio", "penstock.telemetry.exporting",
    "penstock.telemetry.live", "penstock.telemetry.observation", "penstock.telemetry.profiling.records",
    "penstock.testing", "penstock.workers",
    "importlib.metadata", "multiprocessing", "random", "structlog", "sysconfig", "unicodedata", "zipfile",
)  # fmt: skip


def test_import_loads_what_most_programs_need_and_no_more() -> None:
    dataclasses, *loaded = run_program(LOADED).split()
    assert [name for name in loaded if name.startswith(LATE)] == []
    # Each dataclass takes half a millisecond or more. With 87 dataclasses and 220 modules, the import took 2.6 times as
    # long as all dependencies; now it takes 1.4 times as long.
    assert int(dataclasses) <= 49
    assert len([name for name in loaded if name.startswith("penstock")]) <= 140


# The package is replaced by an empty module, so only modules that the imported module needs are loaded.
WITHOUT_THE_ENGINE = """
import asyncio, sys, types
sys.modules["penstock"] = around = types.ModuleType("penstock")
around.__path__ = [sys.argv[1]]
from penstock import testing
async def main():
    await asyncio.sleep(1)
    await testing.wait_quiescent()
testing.run_virtual(main)
testing.interleavings(main, count=2)
outcomes = list(testing.cancel_at_every_step(main))
print(*(name for name in sys.modules if name.startswith("penstock.")))
"""


def test_tools_for_any_asyncio_code_load_nothing_of_the_engine() -> None:
    loaded = set(run_program(WITHOUT_THE_ENGINE, str(SOURCE)).split())
    assert {name for name in loaded if not name.startswith("penstock.testing")} == {"penstock._public"}
    assert not loaded & {f"penstock.testing.{late}" for late in ("faults", "_inbox", "_replace")}


@pytest.mark.parametrize("module", [penstock, engine, telemetry, data, devices, testing])
def test_names_that_are_imported_late_are_those_that_checkers_see(module: ModuleType) -> None:
    body = ast.parse(Path(str(module.__file__)).read_text()).body
    blocks = [one for one in body if isinstance(one, ast.If)]
    imports = [one for block in blocks for one in block.body if isinstance(one, ast.ImportFrom)]
    seen = {alias.name for one in imports for alias in one.names if alias.asname is None}
    late = {
        name
        for block in blocks
        for one in ast.walk(block)
        if isinstance(one, ast.Dict)
        for names in one.values
        if isinstance(names, ast.Constant)
        for name in str(names.value).split()
    }
    assert seen == late
    assert all(getattr(module, str(name)) is not None for name in late)
    assert late <= set(dir(module)) & set(module.__all__)  # `from ... import *` uses `__all__`
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_the_readme_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "README.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0]
    assert {name for row in table.split("\n|") for name in re.findall(r"`(\w+)`", row.partition("|")[0])} == set(extras)


def test_the_version_is_that_of_the_package() -> None:
    assert penstock.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_script_is_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["penstock"]
    main = pkgutil.resolve_name(script)
    for program, shown in (
        ("/usr/local/bin/penstock", "usage: penstock "),
        ("x/__main__.py", "usage: python -m penstock "),
    ):
        monkeypatch.setattr(sys, "argv", [program, "--version"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code, capsys.readouterr().out) == (0, f"penstock {penstock.__version__}\n")
        monkeypatch.setattr(sys, "argv", [program, "--help"])
        with pytest.raises(SystemExit):
            main()
        assert capsys.readouterr().out.startswith(shown)


def test_every_folder_of_the_source_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [path.parent.relative_to(SOURCE).parts for path in SOURCE.rglob("__init__.py")]
    packages = {".".join(("penstock", *parts)) for parts in folders}
    assert packages == set(settings["packages"]), "list every folder in pyproject.toml under [tool.setuptools]"
    assert (SOURCE / "py.typed").exists()


def test_a_reader_can_hold_the_chat_example() -> None:
    lines = sum(map(code_lines, (ROOT / "examples" / "chat").glob("*.py")))
    assert lines <= 700, f"examples/chat has {lines} lines of code: take out what it does not need"
