"""A seeded fuzzer over every file and reply that another program or person may have made.

`python -m fuzz` (with `PYTHONPATH=tests`) runs what CI runs; `python -m fuzz TARGET SEED` runs one
input in this process; `python -m fuzz TARGET FIRST COUNT` runs others.

`mutation` makes inputs, the `*_targets` modules hand them to the product, `child` runs a group of
targets in a process with a watchdog and a memory limit, and `campaign` starts the children.
"""
