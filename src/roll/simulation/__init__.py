"""Simulation of runs in virtual time: the schedulers of real runs, with models of engines, trainers and rewards."""
