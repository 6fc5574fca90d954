"""A receiver of OTLP in a process of its own, over gRPC and HTTP, that keeps the requests that it gets, undecoded.

It prints where it listens. For each line of its standard input, it writes the number of requests that have come since
the last time, and a line for each request. It ends with its standard input.
"""

import base64
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Request:
    """One request as it came over the wire.

    Attributes:
        protocol: "http/protobuf" or "grpc".
        target: the path of the URL, or the full name of the method.
        encoding: how its body was compressed; gRPC does not tell.
        body: the message, not compressed.
        headers: the headers of HTTP, or the metadata of gRPC, in lower case.
    """

    protocol: str
    target: str
    encoding: str
    body: bytes
    headers: dict[str, str]

    @property
    def signal(self) -> str:
        return "traces" if "trace" in self.target.lower() else "metrics"


@dataclass
class Receiver:
    """The addresses at which a receiver listens, and the requests that were collected."""

    endpoints: dict[str, str]
    process: subprocess.Popen[str]
    requests: list[Request] = field(default_factory=list[Request])

    def collect(self) -> list[Request]:
        """Replaces the requests by those that have come since the last time, and returns them."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        lines = [json.loads(self.process.stdout.readline()) for _ in range(int(self.process.stdout.readline()))]
        self.requests = [Request(**{**fields, "body": base64.b64decode(fields["body"])}) for fields in lines]
        return self.requests

    def bodies(self, signal: str) -> list[bytes]:
        return [request.body for request in self.requests if request.signal == signal]


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver for the length of a `with` block; after the block, the receiver has its requests."""
    command = [sys.executable, "-m", "tests.telemetry.otlp_receiver"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        receiver = Receiver(json.loads(process.stdout.readline()), process)
        yield receiver
        receiver.collect()


# --- The program ---

_kept: list[dict[str, object]] = []  # written when asked for: nobody reads a pipe before, and it holds little


def keep(protocol: str, target: str, encoding: str, body: bytes, headers: dict[str, str]) -> None:
    kept = {"protocol": protocol, "target": target, "encoding": encoding, "headers": headers}
    _kept.append({**kept, "body": base64.b64encode(body).decode()})


class Handler(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP; an empty answer says that all was taken."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        encoding = self.headers.get("content-encoding", "")
        assert self.headers["content-type"] == "application/x-protobuf"
        headers = {name.lower(): value for name, value in self.headers.items()}
        keep("http/protobuf", self.path, encoding, gzip.decompress(body) if encoding == "gzip" else body, headers)
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def serve_grpc() -> Any:
    """Start the services of OTLP for gRPC; returns the server and its port."""
    import grpc

    class Services(grpc.GenericRpcHandler):
        """Takes a call of any method; an empty answer says that all was taken."""

        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            target = handler_call_details.method.rpartition(".")[2]
            headers = {name: str(value) for name, value in handler_call_details.invocation_metadata}

            def export(body: bytes, context: object) -> bytes:
                keep("grpc", target, "", body, headers)
                return b""

            return grpc.unary_unary_rpc_method_handler(export)

    server = grpc.server(ThreadPoolExecutor(4), [Services()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


def main() -> None:
    grpc_server, grpc_port = serve_grpc()
    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=http_server.serve_forever, daemon=True).start()
    http_port = http_server.server_address[1]
    endpoints = {"grpc": f"http://127.0.0.1:{grpc_port}", "http/protobuf": f"http://127.0.0.1:{http_port}"}
    print(json.dumps(endpoints), flush=True)
    while sys.stdin.readline():
        kept, _kept[:] = [*_kept], []
        print(len(kept), *map(json.dumps, kept), sep="\n", flush=True)
    grpc_server.stop(None).wait()


if __name__ == "__main__":
    main()
