"""Debian packages that some tests need: `tests/packages.txt` lists them, and `.ci/run` installs them if it can."""

import os
from pathlib import Path

import pytest

PACKAGES = Path(__file__).with_name("packages.txt").read_text().split()
# `.ci/run` sets the variable when it has installed the packages: then no test is skipped because a package is missing.
ARE_INSTALLED = bool(os.environ.get("PENSTOCK_TEST_PACKAGES"))


def needs_package(package: str, program: str | None) -> pytest.MarkDecorator:
    """Return a mark for tests that need a program; it skips them if the program is not found.

    Args:
        package: the package that has the program.
        program: the path of the program; None if it was not found.

    Raises:
        RuntimeError: the package was installed, but its program is not found.
    """
    assert package in PACKAGES, f"{package} is not in tests/packages.txt"
    if program is None and ARE_INSTALLED:
        raise RuntimeError(f"the package {package} was installed, but its program is not found")
    return pytest.mark.skipif(program is None, reason=f"needs the Debian package {package}: apt-get install {package}")
