"""Shared parts of pipelines whose policy generates rollouts while it trains.

`opening` starts the roles of a run, `online_run` stores them, and `loop` repeats the step: collect, learn, sync,
record. `protocols` has the loop's interfaces to a run and to a pipeline's objective; `answers` is the objective of
pipelines without an `algorithm`. `sampling` builds the controller, `boundary` ends a step, and `check/` checks a run
beforehand.
"""
