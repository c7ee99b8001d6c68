"""Code rewards: extract programs from answers, run them in sandboxes, and check their results. See
docs/code-rewards.md."""
