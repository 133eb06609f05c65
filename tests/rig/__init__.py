"""The CPU rig: a real SGLang server on a machine without a GPU, for the demo and the tests.

Import it as ``rig`` with ``tests/`` on the path. Nothing here is part of the shipped packages.
"""
