"""Text games, one per file, with GEM's names, parameters and rewards."""
