"""Code that runs in sandboxes: the candidate's side, the checker's side, and their message format.

It is mounted as the package `sandbox_programs` and imported in advance; standard library only, Python 3.10 or newer.
Nothing here contains an expected result, because the candidate's code runs in a fork of the candidate side's process.
"""
