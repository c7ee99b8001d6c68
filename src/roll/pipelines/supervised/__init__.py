"""The parts that pipelines share which learn from given examples.

`opening` starts the roles, `course` holds a run's parts and its step, and `loop` repeats the step. `asking` and `kept`
compute and store what frozen models say of the examples; `measuring` and `answers` evaluate; `check` and `preparation`
come before the run.
"""
