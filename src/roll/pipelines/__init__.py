"""Pipelines: each is its objective and what it opens; `commands` has what the command line calls.

A pipeline has a package of its own (`rlvr/`, `agentic/`, `sft/`, …) with `pipeline` and `check`, and a name in
`registry`. They share `online/` (learning from rollouts), `reinforcement/` (by an `algorithm`), `supervised/` (learning
from given examples), and the parts of a run: `run`, `learner`, `generation`, `live_policy`, `evaluation`.
"""
