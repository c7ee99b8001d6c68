"""What pipelines share that learn from given examples: drawing, measuring the held-out ones, crossing boundaries."""
