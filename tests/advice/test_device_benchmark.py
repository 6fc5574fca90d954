"""The device benchmark measures what it reports; the speed of a device is not tested."""

import dataclasses

import pytest

import penstock as ps
from penstock import devices
from penstock.advice.device_benchmark import Case, summarise
from penstock.devices.self_check import SelfCheck

pytest.importorskip("jax")


@pytest.mark.several_devices
def test_every_operation_is_measured_and_its_work_counted_as_documented() -> None:
    found = devices.benchmark("cpu:2", seconds=0.05)
    assert found.platform == "cpu"
    of_smallest = {one.operation: (one.shape, one.work, one.unit) for one in reversed(found.measurements)}
    assert of_smallest == {
        "matmul": ((256, 256), 2 * 256**3, "FLOP"),
        "elementwise": ((4096,), 2 * 4 * 4096, "B"),
        **dict.fromkeys(("reduction", "host to device", "device to host"), ((4096,), 4 * 4096, "B")),
    }
    for one in found.measurements:
        assert one.runs >= 1
        assert 0 < one.low_seconds <= one.median_seconds <= one.high_seconds
        assert one.rate == pytest.approx(one.work / one.median_seconds)
        assert 0 < one.peak_share <= 1
    assert "FLOP/s" in str(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.seconds = 0


def test_shares_are_of_the_best_for_the_same_resource() -> None:
    found = summarise(
        [
            Case("matmul", (2, 2), 100, "FLOP", list, len, [1, 2, 3, 4, 5]),
            Case("elementwise", (8,), 100, "B", list, len, [5.0]),
            Case("elementwise", (16,), 100, "B", list, len, [2.0]),
            Case("reduction", (8,), 100, "B", list, len, [4.0, 4.0]),
            Case("host to device", (8,), 100, "B", list, len, [8.0]),
            Case("device to host", (8,), 100, "B", list, len, [10.0]),
        ]
    )
    assert [one.peak_share for one in found] == [1, 0.4, 1, 0.5, 1, 1]
    assert (found[0].low_seconds, found[0].median_seconds, found[0].high_seconds) == (2, 3, 4)
    assert [one.rate for one in found] == [pytest.approx(100 / seconds) for seconds in (3, 5, 2, 4, 8, 10)]


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_the_time_must_be_one(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"benchmark\(seconds="):
        devices.benchmark("cpu", seconds=seconds)


def test_a_device_that_computes_wrong_values_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SelfCheck(lambda device, matrix: matrix[0])
    monkeypatch.setattr("penstock.devices.self_check.SELF_CHECK", wrong)
    with pytest.raises(ps.DeviceError, match="computes wrong values"):
        devices.benchmark("cpu")
