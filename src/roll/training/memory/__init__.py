"""Less memory: meta-device initialization, activation checkpointing and offload, and states in 8 and 4 bits."""
