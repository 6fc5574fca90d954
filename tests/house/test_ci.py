"""`.ci/run` installs the Debian packages that tests need, so that no test is skipped; releases and workflows.

Constraint files pin exact versions, and do not say from which index the versions came.
"""

import contextlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests import packages

ROOT = Path(__file__).parents[2]


def run(folder: Path, *, user: str = "0", apt_get: str | None = "exit 0", are_there: bool = False) -> tuple[int, str]:
    """Run `.ci/run` with fake programs that print how they were called; return its exit status and output."""
    programs = {
        "make": 'echo "make $*, packages ${PENSTOCK_TEST_PACKAGES-}"',
        "id": f"echo {user}",
        "dpkg": f"exit {int(not are_there)}",
        "apt-get": None if apt_get is None else f'echo "apt-get $*" >>{folder}/called; echo a mirror; {apt_get}',
    }
    for name, program in programs.items():
        if program is not None:
            (folder / name).write_text(f"#!/bin/sh\n{program}\n")
            (folder / name).chmod(0o755)
    for name in ("bash", "dirname"):
        (folder / name).symlink_to(shutil.which(name) or "")
    done = subprocess.run(
        [folder / "bash", ROOT / ".ci" / "run"], env={"PATH": str(folder)}, capture_output=True, text=True, check=False
    )
    called = folder / "called"
    return done.returncode, done.stdout + done.stderr + (called.read_text() if called.exists() else "")


def test_packages_are_installed_before_the_tests_which_may_not_skip_them(tmp_path: Path) -> None:
    status, said = run(tmp_path)
    assert (status, "mirror" in said) == (0, False)
    assert re.search(r"apt-get install .*chromium.* wrk", said)
    assert "make test PYTEST_ARGS=-rfEs, packages installed\n" in said


def test_what_is_there_is_not_installed_again(tmp_path: Path) -> None:
    status, said = run(tmp_path, are_there=True)
    assert (status, "apt-get" in said) == (0, False)
    assert "make test PYTEST_ARGS=-rfEs, packages installed\n" in said


@pytest.mark.parametrize("lacks", [{"user": "1000"}, {"apt_get": None}], ids=["root", "apt-get"])
def test_where_nothing_can_be_installed_that_is_said(lacks: dict[str, Any], tmp_path: Path) -> None:
    status, said = run(tmp_path, **lacks)
    assert status == 0
    assert said.startswith(f"NOT INSTALLED, for want of root or apt-get: {' '.join(packages.PACKAGES)}.")
    assert "make test PYTEST_ARGS=-rfEs, packages \n" in said


def test_an_installation_that_fails_ends_the_run_without_naming_mirrors(tmp_path: Path) -> None:
    status, said = run(tmp_path, apt_get="exit 100")
    assert (status, "make" in said, "mirror" in said) == (1, False, False)
    assert f"apt-get has not installed these packages, which tests need: {' '.join(packages.PACKAGES)}" in said


def test_a_program_that_was_installed_and_is_not_found_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "ARE_INSTALLED", False)
    assert packages.needs_package("wrk", None).kwargs["reason"] == "needs the Debian package wrk: apt-get install wrk"
    monkeypatch.setattr(packages, "ARE_INSTALLED", True)
    packages.needs_package("wrk", sys.executable)
    with pytest.raises(RuntimeError, match="the package wrk was installed, but its program is not found"):
        packages.needs_package("wrk", None)


def test_every_package_is_one_that_a_test_needs() -> None:
    named = {
        found
        for file in (ROOT / "tests").rglob("*.py")
        for found in re.findall(r'needs_package\("([^"]+)"', file.read_text())
    }
    assert named == set(packages.PACKAGES)


WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
PIN = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.+!]*")
CONSTRAINTS = [ROOT / "constraints.txt", *sorted(ROOT.glob("tests/backends/constraints*.txt"))]


def requirements(path: Path) -> list[str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.name)
def test_constraints_are_names_and_versions_only(path: Path) -> None:
    assert [line for line in requirements(path) if not PIN.fullmatch(line)] == []
    assert "://" not in path.read_text()


def test_every_tool_of_the_extras_is_pinned() -> None:
    wanted = [*PROJECT["dependencies"]]
    for extra in ("dev", "demo", "docs", "kafka", "otlp", "postgres", "rich", "serving", "uvloop"):
        wanted += PROJECT["optional-dependencies"][extra]
    names = {re.split(r"[\[<>=!;]", line)[0] for line in wanted} - {"penstock"}
    pinned = {line.split("==")[0] for line in requirements(ROOT / "constraints.txt")}
    assert names - pinned == set()


def test_workflows_test_each_python_and_publish_what_was_tried_on_each() -> None:
    supported = re.findall(r":: (3\.\d+)\b", "\n".join(PROJECT["classifiers"]))
    [matrix] = re.findall(r"python: \[(.+)\]", WORKFLOWS["tests"])
    assert re.findall(r'"(.+?)"', matrix) == supported
    [tried] = re.findall(r"python-version: \|\n((?: +3\.\d+\n)+)", WORKFLOWS["publish"])
    assert tried.split() == supported


def test_workflows_run_what_there_is() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = re.findall(r"- run: (\S+)(?: ([\w-]+))?", "\n".join(WORKFLOWS.values()))
    assert {target for program, target in called if program == "make"} <= targets
    assert {program for program, _ in called} == {"make", ".ci/run"}
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.parametrize(
    ("date", "tag", "said", "is_refused"),
    [
        ("2026-12-01", f"v{VERSION}", "", False),
        ("unreleased", None, "NOT YET DATED: ", False),
        ("unreleased", f"v{VERSION}", "write the date of the release there", True),
        ("2026-12-01", "v9.9.9", f"tag v{VERSION}, or change the version", True),
        (None, None, "CHANGELOG.md has no ", True),
    ],
)
def test_a_release_has_the_version_of_its_tag_and_a_date(
    date: str | None, tag: str | None, said: str, is_refused: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_version = runpy.run_path(str(ROOT / ".ci/release.py"))["check_version"]
    check_version.__globals__["ROOT"] = tmp_path
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {VERSION if date else '0.0.1'} ({date})\n")
    with pytest.raises(SystemExit, match=re.escape(said)) if is_refused else contextlib.nullcontext():
        check_version(tag)
    assert is_refused or said in capsys.readouterr().out
