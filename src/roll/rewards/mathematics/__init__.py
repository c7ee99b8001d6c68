"""Normalize, parse and compare mathematical answers."""
