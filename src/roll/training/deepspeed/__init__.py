"""The `deepspeed` training back-end: DeepSpeed ZeRO stages 0 to 3. Needs the extra `deepspeed`.

`initialize` configures and starts DeepSpeed, `backend` is one rank, `zero_weights` reads and writes the weights and
optimizer states that ZeRO partitions, and `state_offload` moves them off the device and back.
"""
