"""Offline distillation: a teacher judges every token of given answers."""
