"""Checkpoints of trainers, and models exported as safetensors.

`state` saves and loads a trainer of the back-end `torch`; `full_state` does so for back-ends whose library has its own
layout of states. `writer` writes while training continues, and `reader` reads the index. `export` and `shards` write a
model for other programs.
"""
