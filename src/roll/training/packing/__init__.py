"""Which samples share a micro-batch and a prefix, and where each token lies in it. NumPy only."""
