"""Techniques that reduce memory during training; each module implements one setting.

`deferred_weights` (meta-device initialization), `activation_checkpointing` (also tiled MLP), `activation_offload`,
`host_memory` (optimizer offload), `adamw_8bit` (8-bit AdamW), `nf4` (frozen weights in 4 bits), `malloc_trim` (free
memory of a CPU's heap), and `snapshots` (weights of earlier policy versions).
"""
