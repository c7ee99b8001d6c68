"""Checkpoints of trainers, and models exported as safetensors."""
