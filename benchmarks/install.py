"""`python -m benchmarks.install FOLDER`: fills the environment that it runs in with what a folder compares.

Each line of its requirements.txt by itself: one that does not install here is named with the reason and skipped, the
others are measured all the same.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pip_install(constraints: Path, *arguments: str) -> str:
    """Installs; returns why it failed, or nothing."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    command += ["--constraint", str(constraints)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        return ""
    return next((line for line in reversed(done.stdout.splitlines()) if "ERROR" in line), f"exit {done.returncode}")


def main() -> int:
    """Returns 1 only if penstock itself does not install: without it there is nothing to compare."""
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
