"""`engine.tuned_for_serving` sets the collector and the switch interval, and restores both at its end."""

import gc
import sys
import threading

import pytest

from penstock import engine

Settings = tuple[tuple[int, int, int], float, bool]

TUNED: Settings = ((10_000, 20, 20), 0.0005, True)


def settings() -> Settings:
    """Returns thresholds, the switch interval in seconds, and whether anything is frozen."""
    return gc.get_threshold(), sys.getswitchinterval(), gc.get_freeze_count() > 0


@pytest.fixture(autouse=True)
def before() -> Settings:
    gc.unfreeze()  # the session has frozen its modules, and does so again after each test
    return settings()


def test_a_process_is_tuned_inside_and_as_before_outside() -> None:
    thresholds, switch_seconds = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(500, 5, 5)
    sys.setswitchinterval(0.02)
    try:
        with engine.tuned_for_serving():
            with engine.tuned_for_serving():
                assert settings() == TUNED
            assert settings() == TUNED  # the outer one gives back
        assert settings() == ((500, 5, 5), 0.02, False)
        with pytest.raises(ValueError, match="while serving"), engine.tuned_for_serving():
            raise ValueError("while serving")
        assert settings() == ((500, 5, 5), 0.02, False)
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch_seconds)


def test_what_there_is_when_the_server_is_ready_is_collected_and_then_left_out() -> None:
    class Cyclic:
        def __init__(self) -> None:
            self.itself = self

    garbage, kept = Cyclic(), Cyclic()
    del garbage
    with engine.tuned_for_serving():
        assert [found for found in gc.get_objects() if isinstance(found, Cyclic)] == []  # frozen objects are not listed
    assert [found for found in gc.get_objects() if isinstance(found, Cyclic)] == [kept]


def test_the_last_of_several_threads_gives_back_whichever_it_is(before: Settings) -> None:
    entered, may_leave = threading.Event(), threading.Event()

    def serve() -> None:
        with engine.tuned_for_serving():
            entered.set()
            may_leave.wait()

    other = threading.Thread(target=serve)
    with engine.tuned_for_serving():
        other.start()
        entered.wait()
    assert settings() == TUNED  # the first block has ended, the second has not
    may_leave.set()
    other.join()
    assert settings() == before
