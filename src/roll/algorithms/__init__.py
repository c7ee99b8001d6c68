"""Advantages, losses and filters: pure functions of tensors."""
