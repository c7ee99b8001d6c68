"""`roll view`: a run's rollouts, on the full screen of a terminal or as a table."""
