"""Training on preferences: pairs of answers to one prompt, or answers labeled desirable or undesirable."""
