"""Configurations of other libraries as ones of ROLL, with what became of every key.

file ──► keys and values ──► rules (one for each key; docs/migration.md is written from them) ──► Converted
"""
