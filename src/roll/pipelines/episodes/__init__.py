"""Draws of agentic runs: a curriculum of environments, anchors, and demonstrations of the user."""
