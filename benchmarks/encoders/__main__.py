"""`python -m benchmarks.encoders`: texts a second of every encoder, and Penstock's ratio to each other encoder."""

import argparse
import asyncio
import importlib.metadata
import sys
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import report
from ..harness import Measured, Row, Sample, Workload, measure
from ..summary import Limits
from .remote import WorkerError, start
from .shared import TEXTS

RESULTS = Path(__file__).parents[1] / "results" / "encoders-latest.json"

# The module of each encoder, and the distribution that it needs.
ENCODERS = {
    "penstock_graph": "penstock",
    "jax_loop": "jax",
    "sentence_transformers_model": "sentence-transformers",
    "onnx_runtime": "onnxruntime",
}
OURS = "Penstock"
LOOP = "asyncio"
# `make bench-devices` has the limit for the graph's ratio to this encoder.
BY_HAND = "JAX by hand"
AIM = Limits(aim=1, at_least=True)
# The limits compare with the encoder that pads least.
SORTED = "ONNX Runtime, sorted by length"
BARS = {
    "documents": Limits(must=1.05, aim=1.2, at_least=True),
    "mixed lengths": Limits(must=0.97, aim=1.1, at_least=True),
}
ROUNDS = (15, 3)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoders", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter samples: a look, not a claim")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go (default: %(default)s)")
    return parser.parse_args()


@dataclass
class Outcome:
    """The version of an encoder that was measured, or the reason why the encoder was skipped."""

    peer: str
    version: str = ""
    skipped: str = ""


async def run(*, quick: bool) -> tuple[list[Measured], list[Outcome]]:
    """Open every encoder that is installed here, and let the encoders take turns."""
    contenders: dict[str, dict[str, Sample]] = {texts: {} for texts in TEXTS}
    outcomes: list[Outcome] = []
    async with AsyncExitStack() as stack:
        for module, distribution in ENCODERS.items():
            print(f"{module} ...", file=sys.stderr, flush=True)
            outcomes.append(outcome := Outcome(distribution))
            try:
                outcome.version = importlib.metadata.version(distribution)
                started = await stack.enter_async_context(start(module, quick=quick))
                for texts, samples in started.items():
                    contenders[texts] |= samples
            except importlib.metadata.PackageNotFoundError:
                outcome.skipped = "not installed: see what `make bench-embedding` printed"
            except WorkerError as error:
                outcome.skipped = str(error)
        measured: list[Measured] = []
        for texts, samples in contenders.items():
            if OURS not in samples:
                sys.exit(f"{OURS}: {outcomes[0].skipped}")
            workload = Workload(
                name=texts,
                contenders=lambda _, samples=samples: nullcontext(samples),
                rows=tuple(row for name in samples for row in rows(name, texts)),
                control=OURS,
                rounds=ROUNDS,
            )
            measured += await measure(workload, LOOP, quick=quick)
        return measured, outcomes


def rows(name: str, texts: str) -> list[Row]:
    """Return a row with an encoder's own number, and a row with Penstock's ratio to it."""
    own = Row(title=name, subject=name, unit="texts/s")
    if name == OURS:
        return [own]
    limits = None if name == BY_HAND else BARS[texts] if name == SORTED else AIM
    return [own, Row(title=f"{OURS} / {name}", subject=OURS, reference=name, limits=limits)]


def main() -> None:
    chosen = arguments()
    measured, outcomes = asyncio.run(run(quick=chosen.quick))
    report.print_table("encoders on the same texts", report.COLUMNS, map(report.cells, measured))
    for outcome in outcomes:
        if outcome.skipped:
            print(f"{outcome.peer} SKIPPED: {outcome.skipped}")
    report.write_json(chosen.json, measured, quick=chosen.quick, extra={"peers": [asdict(each) for each in outcomes]})


if __name__ == "__main__":
    main()
