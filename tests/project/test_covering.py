"""What a covering set of builds leaves out is nothing that no other build has."""

from __future__ import annotations

import itertools

from covering import covering

TILES, STAGES, ORDERS = ((64, 64), (64, 128), (128, 128)), (1, 2, 3), ("any", "fixed")
ROWS = list(itertools.product(TILES, STAGES, ORDERS))


def pairs(row):
    return itertools.combinations(enumerate(row), 2)


def test_each_pair_is_there_and_few_rows_are():
    found = covering(ROWS, pairs)
    assert {pair for row in found for pair in pairs(row)} == {pair for row in ROWS for pair in pairs(row)}
    assert 9 <= len(found) <= 11 < len(ROWS)
    assert found == covering(ROWS, pairs)


def test_some_rows_are_always_there_and_count():
    always = [((256, 64), 1, "any"), ROWS[5]]
    found = covering(ROWS, lambda row: row, always=always)
    assert found[:2] == always
    assert {value for row in found for value in row} == {*TILES, (256, 64), *STAGES, *ORDERS}
    assert covering(ROWS[:1], lambda row: row, always=ROWS[:1]) == ROWS[:1]


def test_a_trait_may_say_nothing():
    assert covering(ROWS, lambda row: [row[0]] if row[2] == "fixed" else []) == [ROWS[1], ROWS[7], ROWS[13]]
