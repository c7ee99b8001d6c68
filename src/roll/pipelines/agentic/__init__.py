"""Reinforcement learning in environments, over many turns."""
