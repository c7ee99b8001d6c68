"""What people look at: the run directories of ROLL, served as a local web page.

    run directories ──► readers (metrics, rollouts, trace, health …) ──► web (JSON, access) ──► the page (static/)

Readers read files and nothing else: a run that goes on, one that ended and one that was killed look the same.

Invariants:
    - nothing is written into a run directory, and nothing outside the given ones is opened: no link is followed;
    - what a file holds is never trusted: a malformed one is a `problem` that is shown, never an exception;
    - what was read once is not read again unless its file changed.
"""
