"""Builds wheel and sdist, checks them, and runs the README's program with each of them on each Python that is here.

    python .ci/release.py [--tag v0.1.0]

With a tag, the version has to be that of the tag, and the changelog has to have its date. Each environment is empty: it
gets the distribution and what that depends on, and nothing of this checkout. Needs the packages build and twine.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = [name.removeprefix("Programming Language :: Python :: ") for name in PROJECT["classifiers"] if "3." in name]


def run(*command: str | Path, **options: str | Path) -> str:
    """Runs a command and returns what it printed; ends this program with its output if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def pythons() -> dict[str, str]:
    """Returns the Pythons that are supported and here, by version: those on the path, and those that pyenv keeps."""
    found = [sys.executable, *(f"python{version}" for version in VERSIONS)]
    if shutil.which("pyenv"):
        versions = Path(run("pyenv", "root").strip()) / "versions"
        found += [str(path) for version in VERSIONS for path in sorted(versions.glob(f"{version}.*/bin/python"))]
    question = "import json, sys; print(json.dumps(['%d.%d' % sys.version_info[:2], sys.executable]))"
    here: dict[str, str] = {}
    for python in found:
        if path := shutil.which(python):
            asked = subprocess.run([path, "-c", question], capture_output=True, text=True, check=False)
            if asked.returncode == 0:  # a shim of pyenv may have no Python behind it
                version, path = json.loads(asked.stdout)
                here.setdefault(version, path)
    return {version: here[version] for version in VERSIONS if version in here}


def check_version(tag: str | None) -> None:
    """Refuses a version that the changelog does not have, and one that is another than the tag."""
    version = PROJECT["version"]
    heading = re.search(rf"^## {re.escape(version)} \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if heading is None:
        sys.exit(f'CHANGELOG.md has no "## {version} (date)" for the version of pyproject.toml')
    if tag is not None and tag != f"v{version}":
        sys.exit(f"the tag is {tag}, but pyproject.toml has version {version}: tag v{version}, or change the version")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        said = f'CHANGELOG.md says "{heading[0]}": write the date of the release there'
        if tag is not None:
            sys.exit(said)
        print(f"NOT YET DATED: {said}")


def check_files(wheel: Path, sdist: Path) -> None:
    """Compares the files of the package with those that Git knows."""
    tracked = {name.removeprefix("src/") for name in run("git", "ls-files", "src", cwd=ROOT).split()}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name.removeprefix("penstock/") for name in archive.namelist() if name.startswith("penstock/")}
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/src/")[2] for name in archive.getnames() if Path(name).suffix and "/src/" in name}
    for path, names in ((wheel, packed), (sdist, {name for name in inside if ".egg-info/" not in name})):
        if names != tracked:
            sys.exit(f"{path.name} and `git ls-files src` differ in {', '.join(sorted(names ^ tracked))}")


def check_installed(distribution: Path, python: str, program: str, expected: str) -> None:
    """Installs a distribution into an empty environment, and runs the program there."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", "environment", cwd=folder)
        here = Path(folder, "environment/bin/python")
        run(here, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", distribution, cwd=folder, env=clean)
        run(here, "-m", "pip", "--disable-pip-version-check", "check", cwd=folder)
        Path(folder, "program.py").write_text(program)
        printed = run(here, "-W", "error", "program.py", cwd=folder, env=clean)
        if printed != expected:
            sys.exit(f"README.md says\n{expected}\nbut on {python} with {distribution.name} it printed\n{printed}")
        version = run(here.parent / "penstock", "--version", cwd=folder)
        if version != f"penstock {PROJECT['version']}\n":
            sys.exit(f"{distribution.name} says it is {version}")


def main() -> None:
    """Does all of it, and says what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="the tag that is to be published")
    check_version(parser.parse_args().tag)
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would pack what it left there
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    [wheel], [sdist] = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist).strip())
    check_files(wheel, sdist)
    print(f"{wheel.name} and {sdist.name} have each file of src, and no other")
    found = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    here = pythons()
    for version, python in here.items():
        for distribution in (wheel, sdist):
            check_installed(distribution, python, found[1], found[2])
            print(f"Python {version}: {distribution.name} runs the program of the README")
    if missing := [version for version in VERSIONS if version not in here]:
        print(f"NOT RUN, for want of them: Python {', '.join(missing)}")


if __name__ == "__main__":
    main()
