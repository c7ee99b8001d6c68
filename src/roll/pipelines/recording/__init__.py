"""Recording of a run, and replay of the recording without engines, or without a trainer.

    recording/  index.jsonl    a line for each session of the run and for each step, with sizes and checksums
                step-000001/   step.json          outcomes of draws, timings, policy versions
                               groups.parquet     a row for each group: its draw and its prompt's tokens
                               rollouts.parquet   a row for each attempt, with all data that training uses
                               moves.parquet      every state transition of every rollout, with its time
                               requests.parquet   every call to the model: queued, started, ended, tokens

`files`, `tables` and `records` are this format, which docs/replay.md describes by column; `recorder` writes it during a
run. `configuration` derives a replay's configuration from a run's; `checks`, `batches` and `training` replay without
engines; `generation` and `comparison` without a trainer.
"""
