"""The sandbox service: `roll-sandbox serve`. See docs/sandbox-service.md.

    client ── HTTP or WebSocket ──► access (tokens) ──► routes ──► dispatcher ──► worker_link ──► workers
                                                                       │
                                                        records, quotas, tokens ──► store/ (database)

`service` owns all parts; `app` has the routes. `dispatcher` chooses the worker of a sandbox, and passes messages
between clients and workers. `housekeeper` stops expired sandboxes. `rock` has the routes of ROCK's SDK.
"""
