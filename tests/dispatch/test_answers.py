"""When it pays to look for an answer that holds for other sizes, too, and how long it is kept."""

import random

from registry.dispatch.answers import BEGIN, IDLE, MOST, Answers


class Between:
    """An answer for sizes whose first lies in a range."""

    def __init__(self, low, high):
        self.low, self.high = low, high

    def of(self, sizes):
        return self if self.low <= sizes[0] < self.high else None


def served(sizes, answers, reach):
    """How many questions found an answer, and for how many one was looked for, which reaches so far."""
    found = looked_for = 0
    for each in sizes:
        if answers.find(each) is not None:
            found += 1
        elif answers.wanted(each):
            looked_for += 1
            answers.add(Between(each[0], each[0] + reach))
    return found, looked_for


def anything(count):
    draw = random.Random(1)
    return [(draw.randrange(10**6), draw.randrange(10**6)) for _ in range(count)]


def test_sizes_that_go_on_as_they_began_are_answered_soon():
    """A cache that grows by a token, each answer good for 40 of them, which is more than it costs."""
    found, looked_for = served([(1000 + at, 128) for at in range(2000)], Answers(16), 40)
    assert looked_for == 50 and found == 2000 - looked_for - 1


def test_answers_that_do_not_pay_are_looked_for_ever_less():
    found, looked_for = served([(1000 + at, 128) for at in range(2000)], Answers(16), 3)
    assert 16 * looked_for < BEGIN * 16 + found + 2000 / 32


def test_sizes_that_nothing_ties_together_are_left_alone():
    found, looked_for = served(anything(1000), Answers(16), 40)
    assert looked_for <= 6


def test_a_cache_that_grows_after_many_other_calls_is_answered_soon():
    answers = Answers(16)
    served(anything(600), answers, 40)
    found, looked_for = served([(1000 + at, 128) for at in range(400)], answers, 40)
    assert found > 300


def test_answers_that_nobody_takes_go():
    answers = Answers(4)
    for at in range(2 * MOST):
        answers.add(Between(at, at + 1))
    assert len(answers) == MOST and answers.find((2 * MOST - 1,))
    for _ in range(IDLE - 1):
        assert answers.find((10**6,)) is None
    assert answers.find((MOST,)) and len(answers) == MOST, "one held in time"
    for _ in range(IDLE):
        answers.find((10**6,))
    assert not len(answers)
