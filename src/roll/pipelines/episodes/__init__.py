"""Sampling of episodes in agentic runs: the curriculum of environments, anchors, and the user's demonstrations."""
