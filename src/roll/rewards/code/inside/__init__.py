"""What runs in sandboxes: the candidate's side, the checker's side, and the form of what goes between them.

Mounted there as the package `inside` and imported in advance; standard library only, Python 3.10 or newer. Nothing here
knows an expected result: the candidate's side is forked into the candidate's own interpreter.
"""
