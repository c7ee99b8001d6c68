"""Advantages, losses and filters: pure functions of arrays and tensors."""
