"""Reads untrusted run directories: only inside the directory, only regular files, and in bounded portions."""
