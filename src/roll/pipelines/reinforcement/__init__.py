"""The parts that pipelines share which learn from rollouts by an `algorithm` (`rlvr`, `agentic`).

`objective` is their objective, `trainers` describes policy, critics and reference, `sampling` the rollouts to draw,
`demonstrations` imitates experts' answers, and `check` looks at a run beforehand.
"""
