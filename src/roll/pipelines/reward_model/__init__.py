"""Training a reward model."""
