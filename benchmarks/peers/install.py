"""`python -m benchmarks.peers.install`: fills the environment that it runs in, peer by peer.

A peer that does not install here is named with the reason and skipped; the others are measured all the same.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def pip_install(*arguments: str) -> str:
    """Installs; returns why it failed, or nothing."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    command += ["--constraint", str(HERE / "constraints.txt")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        return ""
    return next((line for line in reversed(done.stdout.splitlines()) if "ERROR" in line), f"exit {done.returncode}")


def main() -> int:
    """Returns 1 only if penstock itself does not install: without it there is nothing to compare."""
    if failure := pip_install("--editable", str(ROOT)):
        print(f"penstock does not install: {failure}")
        return 1
    for line in (HERE / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#") and (failure := pip_install(line)):
            print(f"{line} does not install here and will be skipped: {failure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
