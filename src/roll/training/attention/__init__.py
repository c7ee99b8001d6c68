"""Attention over packed rows with shared prefixes: a segment attends to its ancestors and itself.

`packed` selects the implementation of a layer's attention: `varlen` on CUDA, `native` and `fused` (C kernels) or
`matmul_attention` on a CPU. `calls` describes the calls of a micro-batch, `maps` computes statistics of attention for a
loss, and `mixers` computes recurrent layers.
"""
