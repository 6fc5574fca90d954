"""JAX arrays are read as NumPy arrays; with a template, they are read as JAX arrays with the template's placement."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.saving.encoding import Encoded, decode, encode
from penstock.saving.snapshots import Snapshot, SnapshotFolder

jax: Any = pytest.importorskip("jax")
jnp: Any = jax.numpy
P, NamedSharding = jax.P, jax.sharding.NamedSharding


def comes_back(value: Any, template: Any = None) -> Any:
    return decode(Encoded.from_bytes(encode(value).to_bytes()), template)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, (3, 4)) for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "complex64", "int32")),
        ("float32", ()), ("float32", (0, 2)), ("int4", ()), ("int4", (0, 2)),
    ],
)  # fmt: skip
def test_arrays_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = jnp.ones(shape, dtype)
    found = comes_back({"w": array})["w"]
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (array.dtype, shape)
    assert found.tobytes() == np.asarray(array).tobytes()
    restored = comes_back({"w": array}, {"w": jnp.zeros(shape, dtype)})["w"]
    assert isinstance(restored, jax.Array)
    assert (restored.dtype, restored.shape, restored.weak_type) == (array.dtype, shape, False)
    assert restored.committed == array.committed
    assert np.asarray(restored).tobytes() == found.tobytes()


def test_what_came_back_without_a_template_can_have_one_later() -> None:
    value = {"w": jnp.ones((2, 3)), "weak": jnp.full(2, 1.0), "here": np.ones(2), "other": jnp.ones(3, "int32")}
    template = {"w": jnp.zeros((2, 3)), "weak": jnp.full(2, 0.0), "other": jnp.ones(3, "float32")}
    found = comes_back(comes_back(value), template)
    assert isinstance(found["w"], jax.Array)
    assert isinstance(found["weak"], jax.Array)
    assert found["weak"].weak_type
    assert (type(found["here"]), type(found["other"])) == (np.ndarray, np.ndarray)
    assert isinstance(comes_back(value, ())["w"], jax.Array)


@pytest.mark.parametrize(("value", "shape"), [(1, ()), (1.5, (2, 2)), (1.5, (0,))])
def test_a_weak_type_stays_one(value: float, shape: tuple[int, ...]) -> None:
    weak = jnp.broadcast_to(jnp.asarray(value), shape)  # weakly typed: in a sum, the other operand's dtype wins
    assert weak.weak_type
    found = comes_back([weak], [weak])[0]
    assert (found.weak_type, found.dtype, found.tolist()) == (True, weak.dtype, weak.tolist())


def test_keys_come_back_as_keys() -> None:
    keys = {
        "one": jax.random.key(3),
        "some": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "raw": jax.random.PRNGKey(2),
    }
    for template in (None, keys):
        found = comes_back(keys, template)
        for name in ("one", "some"):
            assert found[name].dtype == keys[name].dtype
            assert jax.random.bits(found[name].reshape(-1)[0]) == jax.random.bits(keys[name].reshape(-1)[0])
        assert np.array_equal(found["raw"], keys["raw"])


def test_arrays_without_values_are_refused() -> None:
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(ps.NotStorable, match=r"state\[0\] is an array of JAX without values"):
        encode([gone])
    with pytest.raises(ps.NotStorable, match=r"state\[1\] is an array of JAX without values"):
        jax.jit(lambda x: encode([0, x]))(1)


def test_a_copy_survives_the_donation_of_its_array() -> None:
    array = jnp.arange(1000.0)
    copied = encode(array, copy=True)
    jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(array).block_until_ready()
    assert np.array_equal(decode(Encoded.from_bytes(copied.to_bytes())), np.arange(1000.0))


def test_more_digits_than_jax_has_here_are_an_error() -> None:
    encoded = encode({"w": jnp.ones(2)})
    encoded.structure["w"]["$jax"][1] = "<f8"
    with pytest.raises(ps.CheckpointError, match="float64, which JAX has only with jax_enable_x64"):
        decode(Encoded({**encoded.structure}, {'state["w"]': bytes(16)}), {"w": jnp.ones(2)})


def test_arrays_come_back_onto_the_mesh_of_the_template() -> None:
    here = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
    there = NamedSharding(jax.make_mesh((2, 4), ("x", "y")), P("y", "x"))
    value = {
        "w": jax.device_put(np.arange(64.0, dtype="f4").reshape(8, 8), here),
        "step": jnp.int32(3),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), here),
        "weak": jax.device_put(jnp.full(8, 2.0), here),
    }
    template = {
        "w": jax.device_put(np.zeros((8, 8), "f4"), there),
        "step": jnp.int32(0),
        "keys": jax.device_put(value["keys"], NamedSharding(there.mesh, P("y"))),
        "weak": value["weak"],
    }
    found = comes_back(value, template)
    assert found["w"].sharding == there
    assert np.array_equal(found["w"], value["w"])
    assert not found["step"].committed
    assert found["keys"].sharding == template["keys"].sharding
    assert np.array_equal(jax.random.key_data(found["keys"]), jax.random.key_data(value["keys"]))
    assert (found["weak"].weak_type, found["weak"].sharding) == (True, here)
    assert np.array_equal(decode(encode(value, copy=True), template)["w"], value["w"])
    assert isinstance(decode(encode(value), {"w": None})["w"], jax.Array)


def test_a_snapshot_has_them_where_fresh_instances_have_them(tmp_path: Path) -> None:
    states = {"train": {"w": jnp.ones(3)}, "late": {"w": jnp.ones(2)}, "other": {"w": jnp.ones(1)}}
    with SnapshotFolder(tmp_path) as folder:
        folder.save(Snapshot(1, states, {}, ended=False))
        found = folder.newest({"train": {"w": jnp.zeros(3)}, "late": None})
    assert found is not None
    kinds = {name: type(state["w"]) for name, state in found.states.items()}
    assert kinds == {"train": type(jnp.ones(1)), "late": type(jnp.ones(1)), "other": np.ndarray}
