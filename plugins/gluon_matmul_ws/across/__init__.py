"""Products whose second factor has rows at odd distances across K, read in place: kernel.py says how."""
