"""What pipelines share that learn from rollouts by an `algorithm`."""
