"""Less memory: each module is one setting.

`unread` (weights stay in files until they are divided), `recompute` (activation checkpointing, tiled MLP), `saved`
(activation offload), `main_memory` (optimizer offload), `eight_bit` (AdamW in 8 bits), `nf4` (frozen weights in 4
bits), `heap` (a CPU's free memory), and `snapshots` (weights of earlier policy versions).
"""
