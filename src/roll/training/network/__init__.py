"""The HF network as the trainer uses it: loading, packed forward passes, log-probs, values, and adapters."""
