"""Programs: find them in answers, run them in sandboxes, judge what they do. See docs/code-rewards.md."""
