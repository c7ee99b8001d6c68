"""Inspection of an online run before it starts; pipelines add their own checks.

`inspection` checks model, prompts and rewards; `estimate` computes the batch, the memory of each role, and the disk.
"""
