"""Which changes need another program, and which do not; the same as in `jax.jit`."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.devices import programs
from penstock.devices.compiling import CompileCache

from .compiled import called, compiled, configured, leased, mesh_placement, program

CONFIGURATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "x64, everywhere": lambda: configured("jax_enable_x64", True),
    "x64, on this thread": lambda: jax.enable_x64(True),
    "matmul precision, everywhere": lambda: configured("jax_default_matmul_precision", "float32"),
    "matmul precision, on this thread": lambda: jax.default_matmul_precision("float32"),
    "NaNs": lambda: configured("jax_debug_nans", True),
    "NaNs, on this thread": lambda: jax.debug_nans(True),
    "infinities": lambda: configured("jax_debug_infs", True),
    "promotion": lambda: configured("jax_numpy_dtype_promotion", "strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "optimization": lambda: configured("jax_optimization_level", "O1"),
    "mesh": lambda: jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("data",))),
}


@pytest.mark.parametrize("change", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_each_configuration_has_its_own_program(change: Callable[[], AbstractContextManager[Any]]) -> None:
    node, args = program(lambda x: x * x), (np.ones(3, np.float32),)
    with leased(CompileCache()) as cache:
        first = compiled(cache, node, *args)
        with change():
            assert cache.find(node, args) is None
            second = compiled(cache, node, *args)
            assert cache.find(node, args) is second
            np.testing.assert_array_equal(second(*args), np.ones(3))
        assert cache.find(node, args) is first
        with change():
            assert cache.find(node, args) is second
    assert {reason.cause for reason in node.log.statistics().recompilations} == {"configuration"}


@pytest.mark.parametrize("change", [nullcontext, lambda: jax.enable_x64(True)])
def test_the_configuration_of_the_caller_reaches_the_thread_that_compiles(
    change: Callable[[], AbstractContextManager[Any]],
) -> None:
    seen: list[Any] = []

    def fn(x: jax.Array) -> jax.Array:
        seen.append((x.dtype, jax.config.jax_enable_x64))
        return x + 1

    x = np.ones(2, np.float64)
    with leased(CompileCache()) as cache, change():
        result = called(cache, program(fn), x)
        expected = jax.jit(fn)(x)
    assert result.dtype == expected.dtype
    assert seen[0] == seen[1]
    assert jax.config.jax_enable_x64 is False


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clears the cached configuration; resets the x64 option afterwards."""
    monkeypatch.setattr(programs, "_known", {})
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("nothing_known")
def test_a_configuration_that_changes_while_it_is_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    original = programs._state
    changes = iter([True])

    def state() -> Hashable:
        read = original()
        for value in changes:  # changes the option once, as another thread could
            jax.config.update("jax_enable_x64", value)
        return read

    monkeypatch.setattr(programs, "_state", state)
    configuration = programs.current()
    assert configuration.state == original()
    jax.config.update("jax_enable_x64", False)
    with configuration.entered():
        assert jax.config.jax_enable_x64 is True


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("argument", [np.ones(2), [np.ones(2)], 2.5], ids=["array", "list", "number"])
def test_dtypes_are_those_of_a_configuration_whatever_has_been_set_meanwhile(argument: Any) -> None:
    jax.config.update("jax_enable_x64", True)
    configuration, node = programs.current(), program(lambda x: x)
    jax.config.update("jax_enable_x64", False)
    signatures = [programs.signature_of((argument,), (), configuration, node)]
    jax.config.update("jax_enable_x64", True)
    signatures.append(programs.signature_of((argument,), (), programs.current(), node))
    assert "float64" in str(signatures[0])
    assert signatures[0] == signatures[1]


@pytest.mark.usefixtures("nothing_known")
def test_what_is_set_while_a_program_is_compiled_is_none_of_its_business() -> None:
    def fn(x: jax.Array) -> jax.Array:
        jax.config.update("jax_enable_x64", True)  # as another thread could
        return x + np.arange(3.0)

    x = np.ones(3)
    with leased(CompileCache()) as cache:
        executable = compiled(cache, program(fn), x)
        jax.config.update("jax_enable_x64", False)
        assert executable(x).dtype == np.float32


VALUES: dict[str, Callable[[], Any]] = {
    "NumPy float32": lambda: np.ones((2, 3), np.float32),
    "NumPy float64": lambda: np.ones((2, 3)),
    "NumPy int64": lambda: np.arange(3),
    "NumPy bool": lambda: np.ones(3, bool),
    "NumPy scalar": lambda: np.float64(2.5),
    "array": lambda: jnp.ones(3, jnp.bfloat16),
    "weak array": lambda: jnp.asarray(1.5),
    "bool": lambda: True,
    "int": lambda: 3,
    "float": lambda: 2.5,
    "complex": lambda: 1j,
    "key": lambda: jax.random.key(0),
    "keys": lambda: jax.random.split(jax.random.key(0), 3),
    "None": lambda: None,
    "list of numbers": lambda: [1, 2.5, True],
    "nested": lambda: {"a": (np.ones(2), None, [jnp.zeros(3)]), "b": 1},
    "big-endian": lambda: np.ones(2, ">f4"),
    "empty tuple": lambda: (),
}


@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_what_jit_takes_is_taken_with_the_same_result(make: Callable[[], Any], x64: bool) -> None:
    def is_key(leaf: Any) -> bool:
        return jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key)

    def fn(x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf if is_key(leaf) else leaf * 2, x)

    node = program(fn)
    with jax.enable_x64(x64), leased(CompileCache()) as cache:
        value = make()
        try:
            expected = jax.jit(fn)(value)
        except TypeError:
            with pytest.raises(TypeError, match=r"node 'node': x is an array of >f4"):
                cache.find(node, (value,))
            return
        result = called(cache, node, value)
        assert cache.find(node, (make(),)) is not None
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        for got, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            assert str(jax.typeof(got)) == str(jax.typeof(wanted))  # includes the weak type
            if not is_key(got):
                np.testing.assert_array_equal(got, wanted)


def test_what_has_the_same_type_for_jax_shares_a_program() -> None:
    node = program(lambda x: x + 1)
    with leased(CompileCache()) as cache:
        first = compiled(cache, node, np.ones(3, np.float32))
        for same in (np.zeros(3), jnp.ones(3), jax.device_put(jnp.ones(3), jax.devices("cpu")[1])):
            assert cache.find(node, (same,)) is first
        for other in (np.ones(4, np.float32), np.ones((3, 1), np.float32), np.ones(3, np.int32), 1.0, [np.ones(3)]):
            assert cache.find(node, (other,)) is None
        scalar = compiled(cache, node, 1.0)
        assert cache.find(node, (2.0,)) is scalar
        for other in (1, True, np.float32(1), jnp.float32(1)):
            assert cache.find(node, (other,)) is None
        assert compiled(cache, node, jax.ShapeDtypeStruct((3,), np.float32)) is first


def test_a_static_value_is_part_of_the_key_with_its_type() -> None:
    node = program(lambda x, scale, axis: (x * scale).sum(axis), "x", "scale", "axis", static_argnums=(2,))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with leased(CompileCache()) as cache:
        rows = called(cache, node, x, 2.0, 0)
        columns = called(cache, node, x, 2.0, 1)
        np.testing.assert_array_equal(rows, [6, 10, 14])
        np.testing.assert_array_equal(columns, [6, 24])
        assert cache.find(node, (x, 2.0, True)) is None
        assert cache.find(node, (x, 3.0, 1)) is not None
    [reason] = node.log.statistics().recompilations
    assert (reason.argument, reason.cause, reason.before, reason.after) == ("axis", "static value", "0", "1")


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_mesh_program_splits_its_arguments_as_its_specs_say(axis_type: Any) -> None:
    spec = jax.P("data", None)
    placement = mesh_placement((4, 2), ("data", "model"), axis_types=(axis_type, axis_type))
    # Both functions take a spec without a mesh: tracing uses the mesh of the placement.
    constrain = jax.lax.with_sharding_constraint if axis_type is jax.sharding.AxisType.Auto else jax.reshard
    node = program(
        lambda x, w: constrain(x, spec) @ w, "x", "w", placement=placement, in_specs=(spec, None), out_specs=spec
    )
    x, w = np.arange(32, dtype=np.float32).reshape(8, 4), np.ones((4, 4), np.float32)
    with leased(CompileCache()) as cache:
        result = called(cache, node, x, w)
        np.testing.assert_allclose(result, x @ w)
        assert result.sharding.is_equivalent_to(placement.sharding(spec), 2)
        assert node.log.statistics().transfers == 0
        again = called(cache, node, result, jnp.asarray(w))
        np.testing.assert_allclose(again, x @ w @ w)
    assert node.log.statistics().transfers == 1  # only `w` moves; the result already has the sharding of its spec
    assert placement.name == "mesh(data=4, model=2)"
