"""The `megatron` train back-end: Megatron-core's layers and optimizer behind the same protocol, an optional extra.

`initialize` starts Megatron, `convert` and `network` build a network of Megatron's layers, `weight_mapping` maps HF
weights to Megatron's modules, `full_weights` reads and writes weights and optimizer states, and `backend` is one rank.
"""
