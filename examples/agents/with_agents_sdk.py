"""An agent written with OpenAI's Agents SDK (`pip install openai-agents`), which calls `/v1/responses`.

rollout: {agent: {function: examples/agents/with_agents_sdk.py:agent}}
"""

from agents import Agent, MaxTurnsExceeded, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


async def agent(task, base_url, api_key):
    """Answer the task's question; the SDK runs the conversation."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    model = OpenAIResponsesModel(model="policy", openai_client=client)
    helper = Agent(name="helper", instructions="Answer with one number.", tools=[add], model=model)
    try:
        return str((await Runner.run(helper, task.text, max_turns=3)).final_output)
    except MaxTurnsExceeded:
        return ""
