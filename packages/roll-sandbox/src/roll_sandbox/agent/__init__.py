"""The part that runs inside a sandbox, as its first process.

These modules are sent into the sandbox as text or compiled code (`agent_code.py`), so they import the standard library
alone, and little of it: their start is the start of a sandbox. They run on the Python of the sandbox (3.9 or newer).
"""
