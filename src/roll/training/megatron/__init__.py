"""The `megatron` train back-end: Megatron-core's layers and optimiser behind the same protocol, an optional extra."""
