"""Attention over packed rows: calls, kernels by device, and recurrent layers that replace attention."""
