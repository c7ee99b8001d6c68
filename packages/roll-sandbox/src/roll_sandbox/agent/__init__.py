"""Code that runs inside a sandbox, as its first process.

These modules are sent into the sandbox as source or compiled code (`agent_code.py`), so they import only the standard
library. They import as few of its modules as possible, since imports delay the start of every sandbox. They run on the
sandbox's Python, 3.9 or newer.
"""
