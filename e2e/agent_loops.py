"""Runs one tool loop with a published agent package, in an environment that has it: `agent_loops.py PACKAGE URL`.

Each function offers `get_weather` to the scripted model (`tests/scripted_model.py`), which calls it once and answers
after its result. Printed: the arguments of each call, as JSON, then the answer. Nothing of Slipway is imported.
"""

import asyncio
import json
import sys

MODEL = "tiny"
PROMPT = "What is the weather in Paris?"


def get_weather(city: str) -> str:
    """The weather in a city."""
    print(json.dumps({"city": city}))
    return f"It is sunny in {city}."


def openai_agents_responses(url: str) -> str:
    """openai-agents over the Responses API, which is its default."""
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(name="weather", model=model, tools=[function_tool(get_weather)])
    return str(Runner.run_sync(agent, PROMPT).final_output)


def openai_agents_chat(url: str) -> str:
    """openai-agents over chat completions, streamed."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(name="weather", model=model, tools=[function_tool(get_weather)])

    async def run() -> str:
        streamed = Runner.run_streamed(agent, PROMPT)
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)

    return asyncio.run(run())


def pydantic_ai_openai(url: str) -> str:
    """pydantic-ai over chat completions."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    return str(Agent(model, tools=[get_weather]).run_sync(PROMPT).output)


def pydantic_ai_anthropic(url: str) -> str:
    """pydantic-ai over Anthropic's messages."""
    from anthropic import AsyncAnthropic
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = AsyncAnthropic(base_url=url, api_key="none")
    model = AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))
    return str(Agent(model, tools=[get_weather]).run_sync(PROMPT).output)


def litellm_openai(url: str) -> str:
    """litellm as a client of a vLLM server, which is what it takes Slipway for; the loop is written by hand."""
    return _litellm(f"hosted_vllm/{MODEL}", f"{url}/v1")


def litellm_anthropic(url: str) -> str:
    """litellm as a client of Anthropic."""
    return _litellm(f"anthropic/{MODEL}", url)


def _litellm(model: str, base: str) -> str:
    import litellm

    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    messages: list[object] = [{"role": "user", "content": PROMPT}]
    for _ in range(3):
        answer = litellm.completion(model=model, messages=messages, tools=tools, api_base=base, api_key="none")
        message = answer.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message)
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise RuntimeError("the model called its tool again and again")


def langgraph(url: str) -> str:
    """LangGraph's agent over LangChain's client."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none")
    ended = create_react_agent(model, [get_weather]).invoke({"messages": [("user", PROMPT)]})
    return str(ended["messages"][-1].content)


LOOPS = {
    loop.__name__: loop
    for loop in (
        openai_agents_responses, openai_agents_chat, pydantic_ai_openai, pydantic_ai_anthropic, litellm_openai,
        litellm_anthropic, langgraph,
    )
}  # fmt: skip

if __name__ == "__main__":
    print(LOOPS[sys.argv[1]](sys.argv[2]))
