"""Edits a file with OpenHands' SDK, by the interface of `openai` or `anthropic`; the task on standard input."""

import os
import sys

from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent

vendor = sys.argv[1]
llm = LLM(
    model=f"{vendor}/policy",
    base_url=os.environ[f"{vendor.upper()}_BASE_URL"],
    api_key=os.environ[f"{vendor.upper()}_API_KEY"],
)
conversation = Conversation(agent=get_default_agent(llm=llm, cli_mode=True), workspace=os.getcwd())
conversation.send_message(sys.stdin.read())
conversation.run()
