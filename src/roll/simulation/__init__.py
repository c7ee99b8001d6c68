"""Simulation of runs in virtual time: production schedulers with models of engines, trainers and rewards, without
hardware.
"""
