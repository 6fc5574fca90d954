"""Device seconds: what the items of a node waited for on devices."""

from typing import Final, NamedTuple


class DeviceSeconds(NamedTuple):
    """What items waited for on devices; each counts for itself, also those of one batch.

    Args:
        compile_seconds: for a program to be compiled.
        transfer_seconds: for arrays on their way to the device, from another device or back. What was on its way while
            the device computed something else counts only for as long as it held up its own computation.
        compute_seconds: for the device to compute, once it had begun.
    """

    compile_seconds: float
    transfer_seconds: float
    compute_seconds: float

    def plus(self, other: "DeviceSeconds") -> "DeviceSeconds":
        """Return the sum."""
        return DeviceSeconds(*[one + more for one, more in zip(self, other, strict=True)])

    def for_items(self, count: int) -> "DeviceSeconds":
        """Return what so many items have waited for that all waited for this."""
        return DeviceSeconds(*[one * count for one in self])

    def minus(self, earlier: "DeviceSeconds") -> "DeviceSeconds":
        """Return what was added since."""
        return DeviceSeconds(*[one - before for one, before in zip(self, earlier, strict=True)])


NO_DEVICE: Final = DeviceSeconds(0.0, 0.0, 0.0)
