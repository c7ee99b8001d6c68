"""The `megatron` training back-end: layers and distributed optimizer of Megatron-core. Needs the extra `megatron`.

`initialize` starts Megatron, `convert` and `network` build a network of Megatron's layers, `weight_mapping` maps HF
weights to Megatron's modules, `full_weights` reads and writes weights and optimizer states, and `backend` is one rank.
"""
