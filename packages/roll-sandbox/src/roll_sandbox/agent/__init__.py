"""The part that runs inside a sandbox, as its first process.

These modules are sent into the sandbox as source or compiled code (`agent_code.py`), so they import only the standard
library, and little of it, since their start time is part of each sandbox's. They run on the Python of the sandbox (3.9
or newer).
"""
