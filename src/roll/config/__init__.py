"""Typed configuration with strict validation; sections are frozen after loading, and defaults are set only here."""
