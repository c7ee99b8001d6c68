"""Shared parts of pipelines that train on given examples.

`opening` starts the roles, `course` holds a run's parts and its step, and `loop` repeats the step. `asking` and `kept`
compute and store outputs of frozen models for the examples; `measuring` and `answers` evaluate; `check` and
`preparation` run before the roles start.
"""
