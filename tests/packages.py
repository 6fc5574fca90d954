"""Debian packages that some tests need: `tests/packages.txt` lists them, and `.ci/run` installs them where it can."""

import os
from pathlib import Path

import pytest

PACKAGES = Path(__file__).with_name("packages.txt").read_text().split()
# Set by `.ci/run`, which has installed them: there, nothing is skipped for want of one.
ARE_INSTALLED = bool(os.environ.get("PENSTOCK_TEST_PACKAGES"))


def needs_package(package: str, program: str | None) -> pytest.MarkDecorator:
    """Return a mark for tests that need a program: they are skipped where it is not found.

    Args:
        package: the package that has the program.
        program: the path of the program; None if it was not found.

    Raises:
        RuntimeError: the package was installed, and its program is not found all the same.
    """
    assert package in PACKAGES, f"{package} is not in tests/packages.txt"
    if program is None and ARE_INSTALLED:
        raise RuntimeError(f"the package {package} was installed, but its program is not found")
    return pytest.mark.skipif(program is None, reason=f"needs the Debian package {package}: apt-get install {package}")
