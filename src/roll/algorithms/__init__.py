"""Advantages, losses and filters, implemented as pure functions of arrays and tensors."""
