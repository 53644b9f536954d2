"""Every measured claim can be run again from here: `python -m bench NAME`.

Contract: a bench takes --json FILE and --quick, prints a table and, as its last line, one JSON document; its
exit status is 0 when it ran, whatever its claims say. Timings are medians of interleaved repeats, and ratios
come from one run.
"""
