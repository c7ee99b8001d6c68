"""Simulation of runs in virtual time: the real schedulers run with models of engines, trainers and rewards."""
