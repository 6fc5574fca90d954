"""A mesh given by its shape: a value that a module can hold, which becomes a JAX mesh at first use."""

import pytest

import penstock as ps
from penstock import devices

jax = pytest.importorskip("jax")


def mesh(shape, names, **options) -> devices.DeviceMesh:
    return devices.DeviceMesh(shape=shape, axis_names=names, device="cpu", **options)


def test_it_resolves_to_a_mesh_of_jax_with_auto_axes() -> None:
    resolved = mesh((4, 2), ("data", "model")).resolve()
    assert dict(resolved.shape) == {"data": 4, "model": 2}
    assert resolved.axis_types == (jax.sharding.AxisType.Auto,) * 2
    assert set(resolved.devices.flat) == set(jax.devices("cpu"))
    assert resolved == mesh((4, 2), ("data", "model")).resolve()
    assert set(mesh((3,), ("data",)).resolve().devices.flat) == set(jax.devices("cpu")[:3])


def test_it_is_a_value() -> None:
    one, same = mesh((4, 2), ("data", "model")), mesh([4, 2], ["data", "model"])
    assert one == same
    assert hash(one) == hash(same)
    assert one != mesh((2, 4), ("data", "model"))
    assert one.size == 8
    with pytest.raises(AttributeError):
        one.shape = (1, 1)


def test_too_few_devices_are_listed_with_the_remedy() -> None:
    with pytest.raises(ps.DeviceError) as caught:
        mesh((8, 2), ("data", "model")).resolve()
    needs = "shape (8, 2) needs 16 devices"
    for part in (needs, "there are 8", '"cpu:7"', '"jax_num_cpu_devices", 16', "smaller shape"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((), (), "whole number of at least 1"),
        ((4, 0), ("a", "b"), "whole number of at least 1"),
        ((2.0,), ("a",), "whole number of at least 1"),
        ((True,), ("a",), "whole number of at least 1"),
        ((4, 2), ("a",), "one name for each axis"),
        ((4, 2), ("a", "a"), "all different"),
    ],
)
def test_what_does_not_fit_together_is_refused_at_once(shape, names, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh(shape, names)


def test_a_platform_that_is_none_or_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names one device; a mesh takes a platform: 'gpu'"):
        devices.DeviceMesh(shape=(1,), axis_names=("data",), device="gpu:0")
    with pytest.raises(ps.DeviceError, match=r"no platform 'abacus'; this process has.*cpu:0"):
        devices.DeviceMesh(shape=(1,), axis_names=("data",), device="abacus").resolve()
