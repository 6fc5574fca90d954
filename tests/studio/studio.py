"""`penstock studio` in a process of its own, and a client of it."""

import http.client
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class Studio:
    """The page of some sockets, until the end of the `with` block.

    Args:
        arguments: the arguments of the command, such as the paths of the sockets.
        before: what the process runs before the command.
    """

    def __init__(self, *arguments: str | Path, before: str = "pass") -> None:
        program = f"import sys\n{before}\nfrom penstock._cli import main\nsys.exit(main())"
        command = [sys.executable, "-c", program, "studio", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        base, _, self.token = self.address.partition("/#")
        self.port = int(base.rpartition(":")[2])

    def __enter__(self) -> "Studio":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.terminate()
        assert self.process.stdout is not None
        with self.process.stdout:
            assert self.process.wait(30) == 0

    def ask(
        self, path: str, *, method: str = "GET", token: str | None = None, host: str = "127.0.0.1"
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and content of an answer; an empty token sends none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        token = self.token if token is None else token
        headers = {"Host": host, **({"Authorization": f"Bearer {token}"} if token else {})}
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def looks(self, newer: int = 0) -> dict[str, Any]:
        """Return the data that is newer than a look."""
        found: dict[str, Any] = json.loads(self.ask(f"/looks?newer={newer}")[2])
        return found
