"""Read untrusted run directories: only regular files inside the directory, in portions of bounded size."""
