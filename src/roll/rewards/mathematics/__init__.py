"""Mathematical answers: their notation, their shape, and whether two of them are equal."""
