"""Isolated execution of programs that nobody vouches for. Start with `protocols.py` and `docs/security.md`."""
