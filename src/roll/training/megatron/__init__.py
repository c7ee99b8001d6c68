"""The `megatron` train back-end: Megatron-core's layers and optimizer behind the same protocol, an optional extra.

`starting` starts Megatron, `rebuilding` and `network` build the network of its layers, `names` maps HF weights to its
modules, `spread` reads and writes weights and optimizer states, and `backend` is one rank.
"""
