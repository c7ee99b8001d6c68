"""Rejection sampling: fine-tuning on the policy's best answers."""
