"""Starts sandboxes on a host, in one small process per manager (`spawner.py`).

Like the modules of the agent, these are sent to their process as source, and import only the standard library.
"""
