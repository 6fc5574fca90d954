"""The self-check: a JAX that computes wrong values is refused; a JAX that is right is checked once."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import penstock as ps
from penstock.devices.jax_import import require_jax
from penstock.devices.self_check import SelfCheck

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
