"""One streamed tool call with each client of OpenAI's protocol; the Python of the clients' environment runs this file.

It prints the version of the client, the call of the tool, and the final text of the model.
"""

import asyncio
import importlib.metadata
import sys

ASKED = "How is the weather?"


def weather(city: str) -> str:
    """Return the weather of a city."""
    print(f"weather({city!r})")
    return f"sunny in {city}"


async def openai_agents(url: str) -> str:
    from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=url, api_key="none"), use_for_tracing=False)
    result = Runner.run_streamed(Agent(name="agent", model="thinker", tools=[function_tool(weather)]), ASKED)
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


async def langchain_openai(url: str) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="thinker", base_url=url, api_key="none").bind_tools([weather])
    messages = [HumanMessage(ASKED)]
    while True:
        parts = [part async for part in model.astream(messages)]
        message = sum(parts[1:], parts[0])
        if not message.tool_calls:
            return str(message.content)
        results = [ToolMessage(weather(**call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]
        messages = [*messages, message, *results]


async def pydantic_ai_slim(url: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("thinker", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, tools=[weather])
    async with agent.run_stream(ASKED) as result:
        return str(await result.get_output())


async def openai(url: str) -> str:
    from openai import AsyncOpenAI, pydantic_function_tool
    from pydantic import create_model

    tool = pydantic_function_tool(create_model("weather", city=(str, ...)))
    messages = [{"role": "user", "content": ASKED}]
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        while True:
            async with client.chat.completions.stream(model="thinker", messages=messages, tools=[tool]) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            if not message.tool_calls:
                return str(message.content)
            messages.append(message.to_dict())
            for call in message.tool_calls:
                found = weather(call.function.parsed_arguments.city)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


async def schemathesis(url: str) -> str:
    """Send requests that the OpenAPI document allows, and others, to the model; check that no answer is a 500."""
    import hypothesis
    import schemathesis as tool

    def run() -> str:
        document = tool.openapi.from_url(url.replace("/v1", "/openapi.json"))
        asked = 0
        for operation in document.get_all_operations():
            strategy = operation.ok().as_strategy()

            @hypothesis.settings(max_examples=25, deadline=None, suppress_health_check=[*hypothesis.HealthCheck])
            @hypothesis.given(case=strategy)
            def send(case: tool.Case) -> None:
                nonlocal asked
                asked += 1
                if isinstance(case.body, dict):
                    case.body["model"] = "thinker"
                answer = case.call()
                assert answer.status_code < 500, (case.body, answer.text)
                if answer.status_code != 200 and case.method == "POST":
                    error = answer.json()["error"]
                    is_known = error["code"] == "unsupported_value" or error["param"] == "model"
                    assert is_known or str(error["param"]).startswith(("input", "messages", "tool")), (case.body, error)

            send()
        return f"{asked > 100}"

    return await asyncio.to_thread(run)


if __name__ == "__main__":
    name, where = sys.argv[1:]
    print(name, importlib.metadata.version(name))
    print(asyncio.run(globals()[name.replace("-", "_")](where)))
