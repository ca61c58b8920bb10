"""What kernels complain of: words that stay, and a check that raises for them."""

from __future__ import annotations

import pytest
import torch

import registry
from registry.toolbox import complaints

CPU = torch.device("cpu")


@pytest.fixture
def complaint():
    found = complaints.Complaint("test: pages", ("a page is torn", "a page is wet"))
    yield found
    complaints._complaints.remove(found)


def test_check_raises_for_what_was_set_and_forgets_it(complaint):
    registry.check()
    complaint.word(CPU).bitwise_or_(2)
    with pytest.raises(registry.DeviceComplaint) as raised:
        registry.check()
    assert raised.value.complaints == ("test: pages on cpu: a page is wet",)
    registry.check()


def test_a_word_stays_where_it_is(complaint):
    assert complaint.word(CPU).data_ptr() == complaint.word(CPU).data_ptr()


@pytest.mark.parametrize("count", [0, 32])
def test_a_word_has_room_for_31(count):
    with pytest.raises(ValueError, match="allowed: 1 to 31"):
        complaints.Complaint("test", ["x"] * count)
