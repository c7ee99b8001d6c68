"""Rejection sampling: fine-tuning on the policy's own best answers."""
