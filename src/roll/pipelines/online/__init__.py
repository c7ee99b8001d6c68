"""The parts that all pipelines share whose policy answers prompts while it learns.

`opening` starts the roles of a run, `online_run` holds them, and `loop` repeats the step: collect, learn, sync, record.
`protocols` says what the loop asks of a run and of a pipeline's objective; `answers` is the objective of pipelines
without an `algorithm`. `sampling` makes the batches, `boundary` ends a step, and `check/` looks at a run beforehand.
"""
