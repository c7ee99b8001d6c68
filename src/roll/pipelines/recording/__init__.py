"""Recording a run, and running it again from what was recorded: without engines, or without a trainer."""
