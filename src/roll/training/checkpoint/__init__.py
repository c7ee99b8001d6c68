"""Checkpoints of trainers, and models exported as safetensors.

`state` saves and loads a trainer of `torch`, `whole_state` one whose library keeps the states its own way; `writer`
writes while training goes on, and `reader` reads the index. `export` and `shards` write a model for other programs.
"""
