"""Typed configuration: strict, frozen after loading, and the only place where numbers are set."""
