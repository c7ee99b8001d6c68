"""Typed configuration: strict, frozen after loading, and the only place where defaults are set."""
