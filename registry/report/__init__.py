"""One page from raw results: what was measured, against whom, how the tables pick, and what changed since.

`sources` reads files and says what it passed over, `sheet` turns one op of one file into rows, `dispatch` holds the
tables against them, `against` compares two sets of results, `charts` draws, `page` puts all of it into one file that
needs no network. Nothing here knows an op or a kernel by name: which sizes an op is plotted over says its `Tuning`.
"""
