"""Learning from preferences: of two answers to the same, or of answers that are wanted or not."""
