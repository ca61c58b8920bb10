"""Numbers that note what is asked of them: other numbers that meet the conditions take the same way."""

import itertools
import math
import operator
import random

import pytest

from registry.contract.noted import Following, Noted, Notes, Unnoted, noting
from registry.contract.written import compiled


def asked(question, *sizes):
    """The answer for these sizes, and for which others it is the same."""
    notes = Notes()
    with notes:
        answer = question(*notes.sizes(sizes))
    following = notes.following(sizes)
    return answer, lambda other: following.of(other) is not None


QUESTIONS = (
    lambda a, b: "long" if a > 3 * b else "short",
    lambda a, b: ["whole", "ragged"][bool(a % 16)] + ("!" if a == b else ""),
    lambda a, b: max(a, b, 40) - min(a, b) < 17,
    lambda a, b: -(-a // 64) * (b + 1) >= 12 or math.ceil(a / 7) > b,
    lambda a, b: (a | b) & -(a | b) >= 8,
    lambda a, b: {1: "one", 2: "two"}.get(a, "many"),
    lambda a, b: tuple(range(a % 5)) if a else None,
    lambda a, b: f"{a}" if b in (3, 5, 8) else a <= b <= 2 * a,
    lambda a, b: (a.bit_length() if a else 0) > b // 4,
    lambda a, b: math.gcd(a, 12) + (abs(a - b) > 9),
    lambda a, b: 2**a > 1 << b if a < 20 and b < 20 else not a,
    lambda a, b: [sum(a + b > n for n in (60, 20, 90, 40)), sum(not a * b <= n for n in (900, 100)), a - 3 < -b % 5],
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_sizes_that_meet_the_conditions_get_the_same_answer(question):
    draw, met = random.Random(7), 0
    sizes = [(draw.randint(0, 90), draw.randint(0, 90)) for _ in range(60)]
    for example in sizes[:12]:
        answer, holds = asked(question, *example)
        assert answer == question(*example) and holds(example)
        for other in sizes:
            if holds(other):
                met += other != example
                assert question(*other) == answer, (example, other)
    assert met or question is QUESTIONS[9]  # of a greatest common divisor the number itself is asked


def test_code_gives_the_number_for_other_sizes():
    made, _ = asked(lambda a, b: (a * 3 + b) // 2 - (7 - a), 5, 9)
    assert type(made) is Noted and made.value == 10
    assert compiled(made.code, {})((11, 4)) == (11 * 3 + 4) // 2 - (7 - 11)


def test_after_its_question_it_is_its_value():
    """What somebody's cache has kept must not speak in another question."""
    kept, _ = asked(lambda a: a + 1, 4)
    answer, holds = asked(lambda a: a + kept > 7, 3)
    assert answer is True and holds((3,)) and not holds((2,))
    assert kept == 5 and hash(kept) == 5 and [*range(kept)] == [0, 1, 2, 3, 4] and str(kept) == "5"


def test_what_is_worked_out_in_many_steps_is_kept_as_a_number():
    def power_of_two(n):
        n -= 1
        for shift in (1, 2, 4, 8, 16):
            n |= n >> shift
        return n + 1

    answer, holds = asked(lambda n: power_of_two(n) == 64, 40)
    assert answer is True and holds((40,)) and holds((41,)) and not holds((65,))


def test_what_asks_too_much_is_not_remembered():
    with pytest.raises(Unnoted, match="too much"):
        asked(lambda a: [a % n > 7 for n in range(1, 10**5)], 3)
    assert not noting()


def test_sizes_may_differ_in_more_sets_of_places_than_have_code_of_their_own():
    notes, sizes = Notes(), (3, 5, 7, 9, 11)
    with notes:
        a, b, c, d, e = notes.sizes(sizes)
        assert a + b < c + d and (b * e) % 2 > c - d
    following = notes.following(sizes)
    for changes in itertools.product((0, 2, 40), repeat=5):
        a, b, c, d, e = other = tuple(map(operator.add, sizes, changes))
        assert (following.of(other) is not None) == (a + b < c + d and (b * e) % 2 > c - d)
    assert len(following._where) <= Following.MOST + 1


def test_sizes_beyond_what_they_were_compared_with_take_no_code():
    notes, sizes = Notes(), (300, 7)
    with notes:
        a, b = notes.sizes(sizes)
        assert a >= 256.5 and not a > 320 and b < 9.5 and (a * b) % 4 == 0
    following = notes.following(sizes)
    for other in ((256, 8), (321, 8), (256, 10), (9, 7)):
        assert following.of(other) is None
    assert not following._where
    for a, b in itertools.product(range(250, 330), range(12)):
        assert (following.of((a, b)) is not None) == (256.5 <= a <= 320 and b < 9.5 and (a * b) % 4 == 0)


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
@pytest.mark.parametrize("number", [4, 4.0, 4.5, -math.inf])
def test_bounds_hold_the_sizes_that_compare_alike(compare, number):
    for size in range(9):
        notes = Notes()
        with notes:
            answer = bool(compare(*notes.sizes([size]), number))
        following = notes.following((size,))
        for other in range(9):
            assert (following.of((other,)) is not None) == (compare(other, number) is answer)


def test_where_half_of_the_sizes_differ_there_is_one_code():
    notes, sizes = Notes(), (3, 5, 7, 9)
    with notes:
        assert sum(notes.sizes(sizes)) % 4 == 0
    following = notes.following(sizes)
    for changes in ((2, 2, 0, 0), (0, 2, 2, 0), (0, 2, 2, 2), (2, 0, 2, 4)):
        other = tuple(map(operator.add, sizes, changes))
        assert (following.of(other) is not None) == (sum(other) % 4 == 0)
    assert len({id(code) for code in following._where.values()}) == 1
