"""Servers that die, hang, are busy or come back: which requests fail, and when a server is asked again."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import penstock as ps
from penstock import serving
from tests.serving import model_server
from tests.serving.model_server import ModelServer
from tests.serving.openai_server import Messages, asking, chat

ASKED: Messages = [{"role": "user", "content": "hi"}]
CLIENTS, HELD = 32, 8
again = ps.Retry(2, retry_on=serving.UpstreamError, backoff_seconds=0)


@contextlib.contextmanager
def running(port: int = 0) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """Run a model server in a process; yield its port and the process."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", model_server.__name__, str(port)]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(60)
        process.stdout.close()


async def until(http: httpx.AsyncClient, condition: Callable[[], bool]) -> None:
    while not condition():
        await http.get("/health/live")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.asyncio(loop_factories=["asyncio"])  # two processes and real time
async def test_only_what_had_begun_at_a_server_that_dies_or_hangs_fails(how: signal.Signals) -> None:
    with running() as (port, process), running() as (other, _), contextlib.ExitStack() as restarted:
        urls = [f"http://127.0.0.1:{one}/v1" for one in (port, other)]
        up = serving.upstream(urls, check_seconds=0.3, first_seconds=3)
        victim = up.replicas[0]
        async with asking({"safe": up.chat.with_policy(retry=again)}) as http, contextlib.AsyncExitStack() as held:
            begun, failed, done, is_over = set[int](), set[int](), set[int](), False

            async def ask(client: int) -> None:
                for number in range(client, 10**6, CLIENTS):
                    if is_over:
                        return
                    begun.add(number)
                    text = (await chat(http, "safe", f"{number}", stream=True)).text
                    is_whole = text.endswith("data: [DONE]\n\n") and "error" not in text
                    (done if is_whole else failed).add(number)

            streams: list[Any] = []
            for number in range(HELD):  # streams in the middle of their answers
                messages = [{"role": "user", "content": f"held {number}"}]
                body = {"model": "safe", "messages": messages, "stream": True, "user": "endless"}
                stream = await held.enter_async_context(http.stream("POST", "/v1/chat/completions", json=body))
                streams.append(stream.aiter_text())
                await anext(streams[-1])
            lost = victim.in_flight
            reading = [asyncio.ensure_future(anext(stream, "")) for stream in streams]
            async with asyncio.TaskGroup() as clients:
                for number in range(CLIENTS):
                    clients.create_task(ask(number))
                await until(http, lambda: len(done) > 2 * CLIENTS and victim.in_flight > lost)
                at_risk = {*begun}
                os.kill(process.pid, how)
                await until(http, lambda: victim.is_down)
                if how == signal.SIGSTOP:  # until a check was late, requests could not know
                    at_risk = {*begun}
                before = len(done)
                await until(http, lambda: len(done) > before + 2 * CLIENTS and at_risk <= done | failed)
                assert victim.in_flight <= lost
                if how == signal.SIGKILL:
                    process.wait(60)
                    _, process = restarted.enter_context(running(port))
                else:
                    process.send_signal(signal.SIGCONT)
                await until(http, lambda: not victim.is_down and victim.in_flight > lost)
                is_over = True
            ended = [one.result() for one in reading if one.done()]
            assert failed <= at_risk
            assert len(ended) == (lost if how == signal.SIGKILL else 0)
            assert all("error" in text for text in ended)
            for one in reading:
                one.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        if how == signal.SIGKILL:
            assert process.stdout is not None
            said = iter(process.stdout.readline, "chat\n")
            assert list(said).count("check\n") <= 2


async def test_a_server_that_is_down_gets_no_request_until_a_check_has_found_it_well() -> None:
    servers = [ModelServer(), ModelServer()]
    async with servers[0].listening() as one, servers[1].listening() as two:
        up = serving.upstream([one, two], check_seconds=0.01)
        down = serving.upstream(one, check_seconds=0.01)
        async with asking({"up": up, "safe": down.chat.with_policy(failover=up.chat)}) as http:

            async def states() -> tuple[int, dict[str, str]]:
                found = await http.get("/health/ready")
                return found.status_code, found.json()

            for server, health in zip(servers, (503, 404), strict=True):
                server.health = health
            await until(http, lambda: up.replicas[0].is_down and down.replicas[0].is_down)
            for number in range(12):
                assert (await chat(http, "up", f"{number}")).status_code == 200
            assert (len(servers[0].bodies), len(servers[1].bodies)) == (0, 12)
            assert await states() == (200, {"up": "ready", "safe": "ready"})
            servers[1].health = 500
            await until(http, lambda: up.replicas[1].is_down)
            assert await states() == (503, {"up": "down", "safe": "down"})
            assert (await chat(http, "up")).status_code == 200  # all look down, so they are asked
            servers[0].health = 200
            await until(http, lambda: not up.replicas[0].is_down)
            assert (await states())[0] == 200
            assert (await chat(http, "up")).status_code == 200
            assert servers[0].bodies
        asked = servers[0].checks
    assert not [task for task in asyncio.all_tasks() if "_watch" in repr(task)]
    assert servers[0].checks == asked


async def test_a_server_that_is_busy_is_not_down() -> None:
    servers = [ModelServer("busy for long"), ModelServer()]
    async with servers[0].listening() as one, servers[1].listening() as two:
        up = serving.upstream([one, two], breaker=serving.Breaker(failures=1))
        async with asking({"safe": up.chat.with_policy(retry=again)}) as http:
            for number in range(20):
                assert (await chat(http, "safe", f"{number}")).status_code == 200
            assert (len(servers[0].bodies), len(servers[1].bodies)) == (1, 20)  # it asks for a minute
            assert not up.replicas[0].breaker.failed
            servers[1].plan = "busy"
            assert (await chat(http, "safe")).status_code == 429  # all are busy, so they are asked
            assert (await http.get("/health/ready")).status_code == 200
            servers[1].plan = "overloaded"  # without Retry-After
            now = asyncio.get_running_loop().time()
            await chat(http, "safe")
            assert up.replicas[1].busy_until >= now + 0.5


async def test_the_first_part_of_a_stream_is_waited_for_so_long_and_no_longer() -> None:
    servers = [ModelServer("silent"), ModelServer("pauses")]
    async with servers[0].listening() as one, servers[1].listening() as two:
        silent = serving.upstream(one, first_seconds=0.01)
        pauses = serving.upstream(two, first_seconds=30)
        async with asking({"safe": silent.chat.with_policy(failover=pauses.chat), "alone": silent}) as http:
            assert (await chat(http, "alone", stream=True)).status_code == 504
            answer = asyncio.create_task(chat(http, "safe", stream=True))
            while not servers[1].bodies:
                await http.get("/health/live")
            servers[1].resumed.set()  # the time between parts is not bounded
            assert (await answer).text.endswith("data: [DONE]\n\n")
    assert silent.replicas[0].in_flight == servers[0].open == 0
