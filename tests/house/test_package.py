"""What a user gets: names that exist and say what they are, a light import, a complete package."""

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from penstock import devices, testing

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


def exported(module: ModuleType) -> list[str]:
    """Returns the names of `__all__`, or those that do not begin with an underscore and were not just imported."""
    names: list[str] | None = getattr(module, "__all__", None)
    if names is not None:
        return list(names)
    public = [name for name in vars(module) if not name.startswith("_")]
    return [name for name in public if not inspect.ismodule(getattr(module, name))]


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in (penstock, devices, testing) for name in exported(module)]
)
def test_public_name_exists_and_has_a_docstring(module: ModuleType, name: str) -> None:
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
        assert value.__doc__, f"{module.__name__}.{name} has no docstring"


def test_import_loads_neither_jax_nor_the_opentelemetry_sdk() -> None:
    program = "import sys, penstock; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "penstock" in loaded
    heavy = ("jax", "jaxlib", "numpy", "opentelemetry.sdk", "opentelemetry.exporter", "uvloop")
    assert [name for name in loaded if name.startswith(heavy)] == []


def test_every_folder_of_the_source_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [path.parent.relative_to(SOURCE).parts for path in SOURCE.rglob("__init__.py")]
    packages = {".".join(("penstock", *parts)) for parts in folders}
    assert packages == set(settings["packages"]), "list every folder in pyproject.toml under [tool.setuptools]"
    assert (SOURCE / "py.typed").exists()
