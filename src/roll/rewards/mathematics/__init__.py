"""Mathematical answers: how they are written, what they are as a whole, whether two of them are the same."""
