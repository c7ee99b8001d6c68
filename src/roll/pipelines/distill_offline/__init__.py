"""Offline distillation: a teacher scores every token of given answers."""
