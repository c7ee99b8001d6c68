"""Games in text, one a file, with GEM's names, parameters and rewards."""
