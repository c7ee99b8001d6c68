"""Shared parts of pipelines that train on rollouts with an `algorithm` (`rlvr`, `agentic`).

`objective` is their objective, `trainers` has the specs of policy, critics and reference, `sampling` builds the
controller, `demonstrations` plays experts' answers, and `check` checks a run beforehand.
"""
