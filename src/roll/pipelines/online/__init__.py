"""What pipelines share whose policy answers prompts while it learns: a step from rollouts to its boundary."""
