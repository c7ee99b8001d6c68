"""Attention over packed rows: the calls, the kernels by device, and recurrent layers in the place of attention."""
