"""`roll serve`: a training server that clients of the Tinker API use, see docs/how-to/serve-a-training-api.md.

    HTTP ─► server ─► keys, requests, wire ─► service ─┬─► ordering ─► models ─► trainer (one adapter per model)
                                                       ├─► checkpoints (PEFT directories, optimizer states)
                                                       └─► sampling ─► engines ─► snapshots (one adapter each)

    journal ─► accepted requests, results ─► recovery at the next start (states: stored adapters of models)

Requests that take long are answered with a *promise*, a request ID. The result is fetched by a long poll (`promises`).
"""

from roll.serving.settings import ServeSettings

__all__ = ["ServeSettings"]
