"""The part that starts sandboxes on a host: one small process per manager (`spawner.py`).

Like the agent's, these modules are sent to their process as source, and import only the standard library.
"""
