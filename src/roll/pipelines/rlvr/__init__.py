"""Reinforcement learning with verifiable rewards."""
