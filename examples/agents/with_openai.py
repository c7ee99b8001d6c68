"""An agent with a tool, written with OpenAI's client. It contains no code for training.

rollout: {agent: {function: examples/agents/with_openai.py:agent}}
"""

import json

from openai import AsyncOpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Adds, subtracts or multiplies two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "number"},
                    "operator": {"type": "string", "enum": ["+", "-", "*"]},
                    "b": {"type": "number"},
                },
                "required": ["a", "operator", "b"],
            },
        },
    }
]


async def agent(task, base_url, api_key):
    """Answer the task's question, with a calculator as a tool."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [
        {"role": "system", "content": "Answer with one number. You may use the calculator."},
        {"role": "user", "content": task.text},
    ]
    for _ in range(3):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        answer = completion.choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            return answer.content
        for call in answer.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def calculate(arguments):
    """Return the result of a calculation, or the error of a malformed call."""
    try:
        call = json.loads(arguments)
        a, b = float(call["a"]), float(call["b"])
        return f"{ {'+': a + b, '-': a - b, '*': a * b}[call['operator']]:g}"
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}: {error}"
