"""Benches that reproduce every measured claim: `python -m bench NAME`.

A bench takes --json FILE and --quick, prints a table and, as its last line, one JSON document. A bench that ran to
its end exits with status 0, even if it missed claims. Timings are medians of interleaved repeats, and both sides
of a ratio come from the same run.
"""
