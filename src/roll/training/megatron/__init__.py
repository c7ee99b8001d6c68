"""The `megatron` train back-end: Megatron-core's layers and optimizer behind the same protocol. An optional extra."""
