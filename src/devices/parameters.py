"""Parameters: pytrees that come from resources, placed on a device once and not with every call."""

from typing import Any

from .._errors import DeviceError
from .placement import Placement
from .untyped_jax import jax


class PlacedParameters:
    """The parameters that programs use on one device or mesh.

    Every argument that is a parameter keeps its present value placed; one that was reloaded is let go with the last
    call that uses it. Arguments of several nodes that are the same object share a placed copy.

    Args:
        placement: where they are placed.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._present: dict[object, _Placed] = {}

    def place(self, user: object, value: Any) -> Any:
        """Return a parameter as it lies on the device; on the dispatch thread, and it may still be on its way.

        Args:
            user: tells arguments apart; while it uses a value, that stays placed.
            value: the parameter, told apart from others by identity.
        """
        present = self._present.get(user)
        if present is None or present.value is not value:
            shared = next((one for one in self._present.values() if one.value is value), None)
            present = self._present[user] = shared or _Placed(value, self._put(value))
        return present.placed

    def forget(self, user: object) -> None:
        """Let go of what an argument used."""
        self._present.pop(user, None)

    def _put(self, value: Any) -> Any:
        return jax.device_put(value, self._placement.sharding())


def check_same_shapes(old: Any, new: Any) -> None:
    """Refuse parameters for which programs would have to be compiled anew.

    Raises:
        DeviceError: the structure, a shape or a dtype differs.
    """
    before, structure = jax.tree_util.tree_flatten_with_path(old)
    after, other = jax.tree_util.tree_flatten_with_path(new)
    remedy = "parameters with other shapes are those of another model: deploy it beside this one"
    if structure != other:
        raise DeviceError(f"the new parameters have the structure {other}, the present ones {structure}; {remedy}")
    for (path, left), (_, right) in zip(before, after, strict=True):
        if _kind(left) != _kind(right):
            place = jax.tree_util.keystr(path) or "the top"
            raise DeviceError(
                f"the new parameters have {_kind(right)} at {place}, the present ones {_kind(left)}; {remedy}"
            )


def _kind(leaf: Any) -> str:
    shaped = jax.eval_shape(lambda: leaf) if not hasattr(leaf, "dtype") else leaf
    return f"{shaped.dtype}{list(shaped.shape)}"


class _Placed:
    __slots__ = ("placed", "value")

    def __init__(self, value: Any, placed: Any) -> None:
        self.value = value
        self.placed = placed
