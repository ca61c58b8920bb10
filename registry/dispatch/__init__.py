"""Who runs: finding variants, ranking them, deciding, and keeping bound plans."""
