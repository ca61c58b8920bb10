"""The ops. `op.py` is the base of all, `parts/` is what they share, and each op has a folder of its own.

A folder holds an op's front door (op.py), its Problem, argument checks, oracle and torch op, its FLOPs and bytes, and
what the tuner and the conformance kit need to know of it.
"""
