"""Every fault that a run must survive, injected at named steps into the real command line.

`make faults` runs all cases and prints them as a table; `make faults CASE=name` runs one, or all
whose name begins so. Nothing in the product knows of this: the steps are found by wrapping what
the product calls (`steps`), in a process of its own for every command (`arena`).
"""
