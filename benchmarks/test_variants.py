"""Every variant on every shape of the grid. See conftest.py for the options."""

import pytest

from registry.tuning.timing import StandingClock

CLOCK = StandingClock()


@pytest.mark.benchmark(timer=CLOCK.read, warmup=False)
def test_variant(benchmark, contestant, measured):
    found = measured(contestant)
    benchmark.group = f"{contestant.case.op} {contestant.case.text}"
    benchmark.extra_info.update(variant=contestant.variant, config=dict(contestant.config), **found.state)
    median = sorted(found.seconds)[len(found.seconds) // 2]
    benchmark.extra_info["tflops"] = round(contestant.flops / median / 1e12, 4)
    times = iter(found.seconds)
    benchmark.pedantic(lambda: CLOCK.advance(next(times)), rounds=len(found.seconds), iterations=1)
