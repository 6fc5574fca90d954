"""The engine knows executions, but no devices and no worker processes: the execution of a step says where it runs."""

import io
import tokenize

import penstock
from penstock import engine
from penstock.engine import node
from tests.house.test_import_directions import SOURCE

# Exceptions: an option, the public names, and the file that measures the memory of devices.
OPTION, MEASURES = {"device_strategy", "_device_strategy"}, "footprint.py"
PUBLIC = {*penstock.__all__, *engine.__all__}
# An option and a field of the statistics of an Engine; and names of the present process.
OF_THIS_PROCESS = {"max_processes", "processes", "current_process", "_PROCESS", "_process_wide"}


def words_of(kind: str, text: str) -> set[str]:
    """Returns the identifiers of a program that contain a word."""
    names = [
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.NAME
    ]
    return {name for name in names if kind in name.lower()} - OPTION - PUBLIC - OF_THIS_PROCESS


def test_no_identifier_of_the_engine_speaks_of_devices() -> None:
    files = [path for path in (SOURCE / "engine").rglob("*.py") if path.name != MEASURES]
    assert {path.name: words for path in files if (words := words_of("device", path.read_text()))} == {}


def test_no_identifier_of_actors_and_engine_speaks_of_worker_processes() -> None:
    files = [path for part in ("actors", "engine") for path in (SOURCE / part).rglob("*.py")]
    assert {path.name: words for path in files if (words := words_of("process", path.read_text()))} == {}
    assert node._LATE == {"process": "..workers.execution"}  # the only line of the core that leads to the floor


def test_such_a_word_is_seen() -> None:
    assert words_of("device", "device_strategy = DeviceError(_is_device, 'device')  # device") == {"_is_device"}


def test_nothing_but_telemetry_asks_for_the_name_of_an_execution() -> None:
    asked = 'runs_on == "', "execution_of", "make_loop is", "policy.runs_on", "isinstance(execution,"
    found = {
        str(path.relative_to(SOURCE))
        for part in ("engine", "actors", "devices", "testing")
        for path in (SOURCE / part).rglob("*.py")
        if any(word in path.read_text() for word in asked)
    }
    assert found == set()
