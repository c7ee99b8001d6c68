"""Code that runs in sandboxes: the candidate's side, the checker's side, and their message format.

It is mounted as the package `inside` and imported in advance; standard library only, Python 3.10 or newer. Nothing here
holds an expected result: the candidate's side is forked into the candidate's own interpreter.
"""
