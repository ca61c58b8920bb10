"""Every variant on every shape of the grid. See conftest.py for the options."""

import pytest

from registry.tuning.benchmarks import CLOCK, report


@pytest.mark.benchmark(timer=CLOCK.read, warmup=False)
def test_variant(benchmark, contestant, measured):
    report(benchmark, contestant, measured(contestant))
