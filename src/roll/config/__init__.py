"""Typed configuration: strict, frozen after loading, and the only place where a number is asked for."""
