"""Agent programs: an endpoint that vendors' clients talk to, with the policy behind it, and what they did as rollouts.

    agent program ──HTTP──► AgentServer ──► Session ──► LLMProxy ──► engines
                                               └──► Rollout, once the program has ended

See docs/agents.md.
"""

from __future__ import annotations

from roll.agents.session import Answer, Session, Sessions
from roll.agents.tree import Call, as_rollout

__all__ = ["Answer", "Call", "Session", "Sessions", "as_rollout"]
