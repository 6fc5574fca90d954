"""The web server of the live page: it checks the token, and sends headers that keep names from becoming code."""

import json
import re
import secrets
from base64 import b64encode
from collections.abc import Callable, Collection
from hashlib import sha256
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from .page import asset

_OWN_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")
# A client that sends nothing for so long is cut off, since each connection has a thread.
_CLIENT_SECONDS: Final = 10

_PORT: Final = re.compile(r":\d*$")

Answer = Callable[[dict[str, str]], tuple[str, str | bytes]]
"""Takes the query of a request, and returns the kind and the content of the answer.

It raises a LookupError if there is nothing to show, with a sentence.
"""


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


class PageServer(ThreadingHTTPServer):
    """Serves the page at a port of 127.0.0.1.

    The page itself has no figures, so anybody may get it. Its requests for data need the token.

    Args:
        port: the port; 0 for any free port.
        answers: the functions that answer requests of the page, by method and path, such as `("GET", "/looks")`.
        open_answers: the functions that answer requests without a token, by the beginning of the path. The end of the
            path is secret, and is the value of "rest" in the query.
        host_names: names of this machine that a browser may use, besides 127.0.0.1 and localhost.

    Raises:
        OSError: the port cannot be used.
    """

    daemon_threads = True
    block_on_close = False  # a client that is connected and sends nothing does not hold up the end

    def __init__(
        self,
        port: int,
        answers: dict[tuple[str, str], Answer],
        open_answers: dict[str, Answer],
        host_names: Collection[str] = (),
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self.answers = answers
        self.open_answers = open_answers
        self.hosts = {*_OWN_HOSTS, *map(str.lower, host_names)}
        style, script = asset("page.css") + asset("live.css"), asset("theme.js") + asset("live.js")
        page = asset("live.html").replace("/* style */", style).replace("/* script */", script)
        self.page = page.replace("<!-- mark -->", asset("mark.svg")).encode()
        self.policy = (
            f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def address(self) -> str:
        """The address to open, with the token behind the `#`; a browser does not send this part to a server."""
        return f"http://127.0.0.1:{self.server_address[1]}/#{self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log no errors of clients that have left."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride] - no other server makes handlers
    timeout = _CLIENT_SECONDS
    server_version, sys_version = "penstock", ""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        asked = urlsplit(self.path)
        query = dict(parse_qsl(asked.query, keep_blank_values=True))
        if _PORT.sub("", self.headers.get("Host", "").lower()) not in self.server.hosts:
            self._refuse(421, "this is not the name of the machine: start penstock studio with --host-name NAME")
            return
        if (method, asked.path) == ("GET", "/"):
            self._send(200, "text/html", self.server.page, self.server.policy)
            return
        begins, _, rest = asked.path.rpartition("/")
        if method == "GET" and begins in self.server.open_answers:
            self._send_what(self.server.open_answers[begins], {"rest": rest})
            return
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(401, "the token is missing or wrong: open the address that penstock studio has printed")
        elif found := self.server.answers.get((method, asked.path)):
            self._send_what(found, query)
        else:
            self._refuse(404, "there is nothing at this path")

    def _send_what(self, answer: Answer, query: dict[str, str]) -> None:
        try:
            kind, content = answer(query)
        except LookupError as error:
            self._refuse(404, str(error.args[0] if error.args else error))
            return
        # The page of a profile has a policy of its own in its HTML; this header only forbids frames around the page.
        policy = "frame-ancestors 'none'" if kind == "text/html" else "default-src 'none'; frame-ancestors 'none'"
        self._send(200, kind, content.encode() if isinstance(content, str) else content, policy)

    def _refuse(self, status: int, sentence: str) -> None:
        self._send(status, "application/json", json.dumps({"error": sentence}).encode(), "default-src 'none'")

    def _send(self, status: int, kind: str, content: bytes, policy: str) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(content))),
            ("Content-Security-Policy", policy), ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"), ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Keep requests out of the terminal."""
