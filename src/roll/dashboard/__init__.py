"""The dashboard: ROLL's run directories, served as a local web page.

    run directories ──► readers (metrics, rollouts, trace, health …) ──► web (JSON, access) ──► the page (static/)

Readers only read files: a running run, one that ended and one that was killed look the same.

Invariants:
    - nothing is written into a run directory, and nothing outside the given ones is opened: no link is followed;
    - the content of a file is untrusted: a malformed one is a `problem` that is shown, never an exception;
    - a file is read again only if it has changed.
"""
