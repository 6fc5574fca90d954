"""`python -m benchmarks.install FOLDER`: install the packages that a folder compares, into the present environment.

Each line of requirements.txt is installed separately. A package that does not install here is named with the reason and
skipped; the other packages are measured all the same.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pip_install(constraints: Path, *arguments: str) -> str:
    """Install packages; return the reason of a failure, or an empty text."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    command += ["--constraint", str(constraints)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        return ""
    return next((line for line in reversed(done.stdout.splitlines()) if "ERROR" in line), f"exit {done.returncode}")


def main() -> int:
    """Return 1 only if penstock itself does not install: without it, nothing can be compared."""
    folder = Path(sys.argv[1])
    constraints = folder / "constraints.txt"
    if failure := pip_install(constraints, "--editable", str(ROOT)):
        print(f"penstock does not install: {failure}")
        return 1
    for line in (folder / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#") and (failure := pip_install(constraints, *line.split())):
            print(f"{line} does not install here and will be skipped: {failure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
