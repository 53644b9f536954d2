"""Benches that reproduce every measured claim: `python -m bench NAME`.

A bench takes --json FILE and --quick, prints a table and, as its last line, one JSON document. Its exit status is
0 if it ran, even if it missed claims. Timings are medians of interleaved repeats, and both sides of a ratio come
from the same run.
"""
