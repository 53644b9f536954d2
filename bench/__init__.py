"""Every measured claim can be run again from here: `python -m bench NAME`.

Contract: a bench takes --json FILE and --quick, prints a table and, as its last line, one JSON document. Its exit
status is 0 when it ran, even where claims were missed. Timings are medians of interleaved repeats; both sides of a
ratio come from the same run.
"""
