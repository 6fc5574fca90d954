"""Names that do not begin with `penstock.` are those of OpenTelemetry's conventions, of the version that we say."""

import importlib
import pkgutil
from types import ModuleType

import opentelemetry.semconv._incubating.attributes as incubating
import opentelemetry.semconv._incubating.metrics as metrics
import opentelemetry.semconv.attributes as stable
from opentelemetry.semconv.schemas import Schemas

from penstock.telemetry import names


def values_of(package: ModuleType) -> set[str]:
    """Returns the constants of all modules of a package, and the values of their enumerations."""
    found: set[str] = set()
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for value in vars(module).values():
            members = (
                [member.value for member in value] if isinstance(value, type) and hasattr(value, "__members__") else []
            )
            found |= {one for one in [value, *members] if isinstance(one, str)}
    return found


def test_every_name_is_ours_or_one_of_the_conventions() -> None:
    known = values_of(stable) | values_of(incubating) | values_of(metrics) | {"exception"}
    ours = {name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    for constant in ("SEMANTIC_CONVENTIONS", "SCHEMA_URL", "INSTRUMENTATION", "VERSION"):
        del ours[constant]
    assert {
        name: value for name, value in ours.items() if not value.startswith("penstock.") and value not in known
    } == {}


def test_the_version_of_the_conventions_is_one_of_the_registry() -> None:
    assert names.SCHEMA_URL in {schema.value for schema in Schemas}
