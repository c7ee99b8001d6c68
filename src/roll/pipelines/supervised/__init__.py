"""Shared parts of pipelines that train on given examples.

`opening` starts the roles, `supervised_run` holds a run's parts and its step, and `loop` repeats the step.
`frozen_outputs` and `output_store` compute and store outputs of frozen models for the examples; `evaluation` and
`answers` evaluate; `check` and `preparation` run before the roles start.
"""
