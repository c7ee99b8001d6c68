"""Edits a file with smolagents: `code` or `tools`; the task on standard input."""

import os
import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def edit(old: str, new: str) -> str:
    """Replace a word in notes.txt.

    Args:
        old: the word.
        new: the word in its place.
    """
    path = Path("notes.txt")
    path.write_text(path.read_text().replace(old, new))
    return "edited"


model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = CodeAgent if sys.argv[1] == "code" else ToolCallingAgent
print(kind(tools=[edit], model=model).run(sys.stdin.read()))
