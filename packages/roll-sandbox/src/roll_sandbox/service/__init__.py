"""The sandbox service: `roll-sandbox serve`. See docs/sandbox-service.md.

    client ── HTTP or WebSocket ──► access (tokens) ──► routes ──► switchboard ──► links ──► workers
                                                                       │
                                                        records, quotas, tokens ──► store/ (database)

`service` holds all of it and `app` the routes. `switchboard` decides which worker runs a sandbox and passes messages
between clients and workers; `keeper` ends what has expired. `rock` has the routes of ROCK's SDK.
"""
