"""What can be known before it starts of a run whose policy answers prompts while it learns; pipelines add their own."""
