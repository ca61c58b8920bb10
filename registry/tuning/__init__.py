"""From measurements to tables: `measure` runs a sweep, `journal` keeps its raw results, `fit` and `rules` make a table.

`guided` and `refine` choose what is worth measuring, `timing` holds the clocks, `store` the user's own measurements and
tables, and `evidence` says how good a table is.
"""
