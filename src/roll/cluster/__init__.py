"""Devices, placement, and groups of workers, in this process or on Ray."""
