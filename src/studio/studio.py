"""`python -m penstock studio`: a page that shows the graphs of running processes."""

import argparse
import json
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

from .page.live_picture import live_picture
from .page.processes import Processes, Settings
from .page.web import Answer, PageServer

SUMMARY: Final = "serve a page that shows what running processes do, and which step limits them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, and describe the command."""
    parser.description = (
        "Serve a page that shows the graphs of running processes, until Ctrl-C. Each process has to open a socket for "
        'that: `with telemetry.expose("PATH"):`. The address that is printed has a token: who has it may look.'
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a socket that a process has opened, or will open")
    parser.add_argument("--port", type=int, default=0, help="the port of 127.0.0.1 (0, if not given: any that is free)")
    parser.add_argument(
        "--trace-url", type=_trace_url, metavar="URL",
        help="the address of a trace, with {trace_id} in it, such as http://jaeger:16686/trace/{trace_id}",
    )  # fmt: skip
    parser.add_argument(
        "--host-name", action="append", default=[], metavar="NAME",
        help="another name under which a browser may ask, such as that of a proxy",
    )  # fmt: skip
    parser.add_argument("--show-messages", action="store_true", help="show the texts of errors, which may hold values")
    parser.add_argument("--show-keys", action="store_true", help="show keys, and not eight digits that stand for each")


def run(options: argparse.Namespace) -> int:
    """Serve the page until a signal comes; return the exit status."""
    processes = Processes(options.paths, Settings(options.trace_url or "", options.show_messages, options.show_keys))
    try:
        server = server_of(processes, options.port, options.host_name)
    except (OSError, OverflowError) as error:
        print(f"{options.parser.prog}: --port: {options.port} cannot be used: {error}", file=sys.stderr)
        return 2
    # Block the signals in all threads, and wait for them: a signal handler could be interrupted by a second signal, and
    # wait for itself.
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    processes.start()
    serving = threading.Thread(target=server.serve_forever, name="penstock-studio-web")
    serving.start()
    print(server.address, flush=True)
    signal.sigwait(ends)
    server.shutdown()
    serving.join()
    server.server_close()
    return 0


def server_of(processes: Processes, port: int, host_names: list[str]) -> PageServer:
    """Return the server of a page of these processes.

    Raises:
        OSError: the port cannot be used.
    """

    def drawing(query: dict[str, str]) -> Any:
        process, graph = processes.process(query), query.get("graph", "")
        return live_picture(graph, process.drawing(graph), process.steps(graph), query.get("closed"))

    answers = {
        ("GET", "/looks"): _as_json(processes.looks),
        ("GET", "/drawing"): _as_json(drawing),
        ("POST", "/record"): _as_json(processes.record),
    }
    opened: dict[str, Answer] = {"/profiles": lambda query: ("text/html", processes.recorded(query))}
    return PageServer(port, answers, opened, host_names)


def _as_json(answer: Callable[[dict[str, str]], Any]) -> Answer:
    return lambda query: ("application/json", json.dumps(answer(query), separators=(",", ":")))


def _trace_url(text: str) -> str:
    if urlsplit(text).scheme not in ("http", "https") or "{trace_id}" not in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address of a trace: write one that begins with http:// or https://, and has {{trace_id}}"
        )
    return text
