"""`gluon_matmul_odd`: 16-bit products whose rows no tensor map can address, read in place. kernel.py says how."""
