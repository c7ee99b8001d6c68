"""Code rewards: find programs in answers, run them in sandboxes, judge their results. See docs/code-rewards.md."""
