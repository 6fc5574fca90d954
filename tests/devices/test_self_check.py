"""A JAX that computes wrong values is refused, and where its CPU fusions do, Penstock computes right ones.

Wrong values can only be seen with such a JAX, as in `make test-newest`. The remedy can be tested with every JAX:
the programs below can declare the installed JAX to be wrong.
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import penstock as ps
from penstock.devices.jax_import import require_jax
from penstock.devices.self_check import SelfCheck
from penstock.devices.wrong_fusions import OPTION, WRONG_JAXLIBS, XLA_FLAG
from tests.devices.processes import run_program

jax = pytest.importorskip("jax")


def right(device, matrix):
    return (matrix @ np.ones_like(matrix)).sum(0)


def almost_right(device, matrix):
    result = right(device, matrix)
    result[17] += 1
    return result


def test_this_jax_computes_right_values() -> None:
    result = SelfCheck().check(jax.devices("cpu")[0])
    assert (result.platform, result.passed, result.error) == ("cpu", True, None)


@pytest.mark.parametrize("wrong", [almost_right, lambda device, matrix: np.full(len(matrix), np.nan, np.float32)])
def test_wrong_values_are_refused_with_the_remedy(wrong) -> None:
    check = SelfCheck(wrong)
    for _ in range(2):  # also the second time
        with pytest.raises(ps.DeviceError) as caught:
            check.verify(jax.devices("cpu")[0])
        told = f"JAX {jax.__version__} computes wrong"
        for part in (told, "cpu", "pip install", "jax==0.10.1", "XLA_FLAGS="):
            assert part in str(caught.value)
    assert not check.check(jax.devices("cpu")[0]).passed


@pytest.mark.several_devices
def test_the_check_runs_once_for_all_threads_and_devices_of_a_kind() -> None:
    calls = []
    together = threading.Barrier(8)

    def counted(device, matrix):
        calls.append(device)
        return right(device, matrix)

    check = SelfCheck(counted)

    def use(device) -> None:
        together.wait()
        check.verify(device)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, jax.devices("cpu")))
    assert len(calls) == 1


@pytest.mark.several_devices
def test_it_is_not_disturbed_by_what_the_thread_is_in() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices("cpu"))
    device = jax.devices("cpu")[3]
    with jax.set_mesh(mesh):
        SelfCheck().verify(device)

    @jax.jit
    def traced(x):
        SelfCheck().verify(device)
        return x

    traced(1.0)


def test_an_error_of_jax_itself_passes_and_the_next_use_checks_again() -> None:
    outcomes = [RuntimeError("RESOURCE_EXHAUSTED: out of memory"), None]

    def compute(device, matrix):
        if error := outcomes.pop(0):
            raise error
        return right(device, matrix)

    check = SelfCheck(compute)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        check.verify(jax.devices("cpu")[0])
    check.verify(jax.devices("cpu")[0])


@pytest.mark.parametrize("name", ["jax", "jaxlib", "a_module_that_is_not_there"])
def test_without_jax_the_error_names_the_extra_and_a_broken_jax_speaks_for_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    (tmp_path / "jax.py").write_text(f"import {name}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=name) as caught:
        require_jax()
    told = f"named '{name}': pip install \"penstock[jax]\"" in str(caught.value)
    assert told == isinstance(caught.value, ps.MissingExtraError) == (name in ("jax", "jaxlib"))


jaxlib_version = pytest.importorskip("jaxlib.version")

IS_WRONG = jaxlib_version.__version__ in WRONG_JAXLIBS


def of_wrong_ones(test: Callable[..., None]) -> Callable[..., None]:
    """Leave a test to `make test-long` where the installed JAX is right: each such test starts a Python with JAX."""
    return test if IS_WRONG else pytest.mark.long(test)


COMMON = """
import asyncio, os, sys
import numpy as np
import structlog
import penstock as ps
from penstock import devices, engine
from penstock.devices import jax_import, wrong_fusions

if "counts-as-wrong" in sys.argv:
    import jaxlib.version
    wrong_fusions.WRONG_JAXLIBS.add(jaxlib.version.__version__)
events, at_start, before = [], [], os.environ.get("XLA_FLAGS")
structlog.configure(processors=[lambda *event: events.append(event[2]["event"]) or "", ])
start = jax_import.all_devices
jax_import.all_devices = lambda *platform: (at_start.append(os.environ.get("XLA_FLAGS")), start(*platform))[1]

ones = np.ones((256, 256), np.float32)
matrix = (np.arange(256 * 256, dtype=np.float32).reshape(256, 256) % 7) - 3
right = (matrix @ ones).sum(0)
wrong_in = lambda found: int((np.asarray(found) != right).sum())

def product(x):
    return (x @ ones).sum(0)

node = ps.device_node(product)
batched = ps.device_node(batch=ps.Batch(max_size=2))(product)

@ps.graph
async def both(x):
    return node(x), batched(x)

def run_nodes():
    return [wrong_in(one) for one in asyncio.run(engine.run(both(matrix)))]

def run_outside():
    import jax
    return wrong_in(jax.jit(product)(matrix))

def told():
    assert os.environ.get("XLA_FLAGS") == before
    return events.count("jax.may_compute_wrong_values"), at_start[0]
"""


EVERY_PROGRAM = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("rows",))
split, on_one = jax.NamedSharding(mesh, jax.P("rows")), jax.sharding.SingleDeviceSharding(jax.devices()[3])
compiled = {}
jit, compile = jax.jit, jax.stages.Lowered.compile

def seen_jit(fn, **options):
    compiled[fn.__name__] = options.get("compiler_options")
    return jit(fn, **options)

def seen_compile(lowered, compiler_options=None):
    compiled[lowered.as_text().split("@jit_")[1].split()[0]] = compiler_options
    return compile(lowered, compiler_options)

jax.jit, jax.stages.Lowered.compile = seen_jit, seen_compile
from penstock.devices.enqueue_order import reshard
reshard(jax.device_put(matrix, split), on_one)
devices.benchmark("cpu", seconds=0.01)
devices.select()
devices.status()
run_nodes()
with_option = {name for name, options in compiled.items() if options == {wrong_fusions.XLA_OPTION: ""}}
print(*sorted(with_option), "|", *sorted(compiled.keys() - with_option), told())
"""


def printed(program: str, *arguments: str, **variables: str) -> str:
    return run_program(COMMON + program, *arguments, **variables).strip()


@of_wrong_ones
@pytest.mark.parametrize("first", ["run_nodes()", "devices.status()", "devices.select('cpu')"])
def test_nodes_and_jax_outside_of_them_compute_right_values_as_installed(first: str) -> None:
    assert printed(f"{first}; print(run_nodes(), run_outside(), told()[0])") == "[0, 0] 0 0"


@of_wrong_ones
def test_nodes_compute_right_values_where_backends_run_already() -> None:
    program = "import jax; jax.devices(); print(devices.status().self_checks[0].passed, run_nodes(), told()[0])"
    assert printed(program) == f"True [0, 0] {int(IS_WRONG)}"


@of_wrong_ones
@pytest.mark.parametrize(
    ("first", "given"),
    [
        ("run_nodes()", ""),
        ("devices.status()", "--xla_cpu_enable_fast_math=false"),
        ("devices.select()", f"{XLA_FLAG}LIBRARY_FUSION_TYPE_DOT"),
    ],
)
def test_the_flag_is_set_behind_those_of_the_user_while_backends_start(first: str, given: str) -> None:
    found = printed(f"{first}; print(told())", "counts-as-wrong", XLA_FLAGS=given)
    assert found == str((0, f"{given} {XLA_FLAG}".strip()))


def test_every_program_is_compiled_with_the_option_and_backends_that_run_already_are_told_of_once() -> None:
    names = "_identity add_up multiply penstock_self_check product scale |"
    assert printed(EVERY_PROGRAM, "counts-as-wrong", XLA_FLAGS="") == f"{names} {(1, '')}"


@of_wrong_ones
def test_the_flag_is_taken_back_where_backends_cannot_start() -> None:
    program = "print(devices.status().devices, at_start, told()[0])"
    assert printed(program, "counts-as-wrong", JAX_PLATFORMS="abacus", XLA_FLAGS="") == f"() ['{XLA_FLAG}'] 0"


@of_wrong_ones
def test_who_has_set_the_flag_is_not_told_anything() -> None:
    program = "import jax; jax.devices(); print(run_nodes(), run_outside(), told())"
    assert printed(program, "counts-as-wrong", XLA_FLAGS=XLA_FLAG) == f"[0, 0] 0 {(0, XLA_FLAG)}"


@of_wrong_ones
def test_flags_in_a_file_are_left_alone_and_told_of(tmp_path) -> None:
    flags = tmp_path / "flags"
    flags.write_text("--xla_cpu_enable_fast_math=false")
    found = printed("print(run_nodes(), told())", "counts-as-wrong", XLA_FLAGS=str(flags))
    assert found == f"[0, 0] {(1, str(flags))}"


@of_wrong_ones
def test_the_option_leaves_jax_as_it_is_and_the_self_check_judges() -> None:
    program = """
check = devices.status().self_checks[0]
print(check.passed, "Unset " in str(check.error), told())
"""
    found = printed(program, "counts-as-wrong", XLA_FLAGS="", **{OPTION: "0"})
    assert found == f"{not IS_WRONG} {IS_WRONG} {(0, '')}"


@of_wrong_ones
def test_an_option_that_is_neither_0_nor_1_is_refused() -> None:
    found = printed("print(devices.status().backend_error)", "counts-as-wrong", **{OPTION: "off"})
    assert found == f"{OPTION}='off' in the environment: write 1, or 0 to leave JAX as it is"


@pytest.mark.skipif(IS_WRONG, reason="this one is")
def test_a_version_that_is_right_is_left_alone() -> None:
    assert printed("print(run_nodes(), told())", XLA_FLAGS="") == f"[0, 0] {(0, '')}"
