"""The engine knows executions, but no devices: the execution of a step says where the step runs."""

import io
import tokenize

import penstock
from penstock import engine
from tests.house.test_import_directions import SOURCE

# Exceptions: an option, the public names, and the file that measures the memory of devices.
OPTION, MEASURES = {"device_strategy", "_device_strategy"}, "footprint.py"
PUBLIC = {*penstock.__all__, *engine.__all__}


def words_of_devices(text: str) -> set[str]:
    """Returns the identifiers of a program that contain the word "device"."""
    names = [
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.NAME
    ]
    return {name for name in names if "device" in name.lower()} - OPTION - PUBLIC


def test_no_identifier_of_the_engine_speaks_of_devices() -> None:
    files = [path for path in (SOURCE / "engine").rglob("*.py") if path.name != MEASURES]
    assert {path.name: words for path in files if (words := words_of_devices(path.read_text()))} == {}


def test_such_a_word_is_seen() -> None:
    assert words_of_devices("device_strategy = DeviceError(_is_device, 'device')  # device") == {"_is_device"}


def test_nothing_but_telemetry_asks_for_the_name_of_an_execution() -> None:
    asked = 'runs_on == "', "execution_of", "make_loop is", "policy.runs_on", "isinstance(execution,"
    found = {
        str(path.relative_to(SOURCE))
        for part in ("engine", "actors", "devices", "testing")
        for path in (SOURCE / part).rglob("*.py")
        if any(word in path.read_text() for word in asked)
    }
    assert found == set()
