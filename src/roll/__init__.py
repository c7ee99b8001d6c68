"""ROLL: reinforcement-learning post-training of language models, from a laptop to a cluster."""
