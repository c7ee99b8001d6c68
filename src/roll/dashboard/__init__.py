"""The dashboard: a local web page that shows ROLL's run directories.

    run directories ──► readers (metrics, rollouts, trace, health …) ──► web (JSON, access) ──► the page (static/)

Readers only read files, so a run is shown in the same way while it runs and after it has ended or was killed.

Invariants:
    - nothing is written into a run directory, nothing outside the given run directories is opened, and no link is
      followed;
    - the content of a file is untrusted: a malformed file is shown as a `problem`, and never raises an exception;
    - a file is read again only if it has changed.
"""
