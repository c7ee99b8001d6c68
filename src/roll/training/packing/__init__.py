"""Sequence packing: samples in micro-batches without padding. NumPy only.

`micro_batches` chooses the samples of each micro-batch, `blocks` finds their common prefixes, and `layout` places their
tokens in one row.
"""
