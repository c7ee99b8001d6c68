"""Converts configurations of other libraries to ROLL, with a report on every key.

file ──► keys and values ──► rules (one for each key; docs/migration.md is generated from them) ──► ConvertedConfig
"""
