"""Inspection of an online run before it starts; pipelines add looks of their own.

`inspection` looks at model, prompts and rewards; `estimate` computes the batch, the memory of each role, and the disk.
"""
