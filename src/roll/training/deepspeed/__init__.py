"""The `deepspeed` train back-end: ZeRO stages 0 to 3 behind the same protocol. Needs the extra `deepspeed`."""
