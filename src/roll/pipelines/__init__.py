"""Pipelines: each has an objective and the roles that it starts; `commands` has the command-line entry points.

A pipeline is a package (`rlvr/`, `agentic/`, `sft/`, …) with `pipeline` and `check`, and a name in `registry`. All
share `online/` (training on rollouts), `reinforcement/` (with an `algorithm`), `supervised/` (training on given
examples), and the parts of a run: `run`, `learner`, `generation`, `served_policy`, `evaluation`.
"""
