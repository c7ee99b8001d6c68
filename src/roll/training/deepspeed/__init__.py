"""The `deepspeed` train back-end: ZeRO stages 0 to 3 behind the same protocol. Needs the extra `deepspeed`.

`starting` configures and starts DeepSpeed, `backend` is one rank, `spread` reads and writes the weights and optimizer
states that ZeRO divides, and `lending` moves them off the device and back.
"""
