"""`python -m penstock serve`: serve graphs in OpenAI's protocol."""

import argparse
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from opentelemetry import trace

from .. import telemetry
from .arguments import refuse
from .target import load

SUMMARY: Final = "serve a graph as a model, in OpenAI's protocol"

_HOW_TO_ASK: Final = """serving {models} at {url}/v1

curl {url}/v1/chat/completions -H 'content-type: application/json'{header} \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
print(client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello"}}]))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, and describe the command."""
    parser.description = (
        "Serve a graph, a node, or a dict from names of models to graphs or nodes. SIGTERM and Ctrl-C end the server "
        "when the answers that have begun are complete. Spans and metrics are sent if an OTEL_* variable names an "
        "exporter or its receiver. This command needs the extra penstock[serving]."
    )
    parser.add_argument("target", metavar="MODULE:NAME", help="a graph, a node, or a dict")
    parser.add_argument("--host", default="127.0.0.1", help="the address (127.0.0.1: only this machine)")
    parser.add_argument("--port", type=int, default=8000, help="the port (8000); 0 for any free port")
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="a file with a key on each line, and a name after it; without a file, everybody may ask",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes; return the exit status."""
    from .. import serving  # here, since it needs an extra

    try:
        found: Any = load(options.target)
        keys = None if options.api_key_file is None else _keys(options.api_key_file)
        _send_telemetry(options.target.rpartition(":")[2])
    except (argparse.ArgumentTypeError, OSError, ImportError, ValueError) as error:
        refuse(options, str(error))
    models = (
        cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {options.target.rpartition(":")[2]: found}
    )
    import uvicorn

    config = uvicorn.Config(serving.openai(models, api_keys=keys), options.host, options.port, log_level="warning")
    listener = config.bind_socket()
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets this only on sockets that it binds
    listener.listen(config.backlog)  # so that the address printed below answers at once
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    header = "" if keys is None else " -H 'authorization: Bearer KEY'"
    key = "none" if keys is None else "KEY"
    told = {"models": ", ".join(models), "model": next(iter(models)), "url": url, "header": header, "key": key}
    print(_HOW_TO_ASK.format(**told), flush=True)
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal of Ctrl-C again once all answers are complete
        uvicorn.Server(config).run([listener])
    return 0


def _send_telemetry(service_name: str) -> None:
    """Send spans and metrics if a variable names an exporter or its receiver, unless the target sends them itself."""
    prefixes = ("OTEL_EXPORTER_OTLP_", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER")
    is_asked = any(name.startswith(prefixes) and value.strip() for name, value in os.environ.items())
    if is_asked and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        telemetry.setup(service_name=service_name)


def _keys(path: Path) -> dict[str, str]:
    """Return the keys in a file with their names; a key without a name has the number of its line."""
    lines = [line.split(None, 1) for line in path.read_text().splitlines()]
    found = {one[0]: one[-1] if len(one) > 1 else f"line {number}" for number, one in enumerate(lines, 1) if one}
    if not found:
        raise argparse.ArgumentTypeError(f"{path} has no keys: write one on each line")
    return found
