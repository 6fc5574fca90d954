"""A function that a test module defines can be sent to a spawned process, which imports the function by name."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor


def double(number: int) -> int:
    return 2 * number


def test_functions_of_test_modules_travel() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(double, 21).result() == 42
