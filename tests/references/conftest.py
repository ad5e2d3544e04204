"""Keeps pytest from importing the recording scripts, which need packages that the tests
do not.
"""

collect_ignore = ["record.py"]
