"""Agent programs: an OpenAI- and Anthropic-compatible endpoint of the policy turns their requests into rollouts.

    agent program ──HTTP──► AgentServer ──► Session ──► LLMProxy ──► engines
                                               └──► Rollout, once the program has ended

See docs/agents.md.
"""

from __future__ import annotations

from roll.agents.session import Answer, Session, Sessions
from roll.agents.tree import ModelCall, build_rollout

__all__ = ["Answer", "ModelCall", "Session", "Sessions", "build_rollout"]
