"""What touches the registers of Hopper's products before anybody waited for them, in small pieces of machine code."""

from __future__ import annotations

import pytest

from registry.toolbox.in_flight import touched_in_flight

PRODUCT = "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"  # writes R24 to R31
FROM_REGISTERS = "HGMMA.64x16x16.F32.BF16 R24, R40, gdesc[UR8], R24, gsb0"  # reads R40 to R43
OTHER = "HGMMA.64x16x16.F32.BF16 R64, gdesc[UR8], R64, gsb0"
ALL = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
ALL_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
END = "EXIT"


def sass(*lines):
    """As nvdisasm writes it; labels are lines of their own."""
    number, found = 0, []
    for line in lines:
        if line.endswith(":"):
            found.append(line)
        else:
            found.append(f"        /*{16 * number:04x}*/                   {line} ;")
            number += 1
    return "\n".join(found)


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        pytest.param([PRODUCT, ALL, "F2FP.BF16.F32.PACK_AB R0, R31, R30", END], [], id="waited"),
        pytest.param([PRODUCT, "F2FP.BF16.F32.PACK_AB R0, R31, R30", ALL, END], [1], id="read before the wait"),
        pytest.param([PRODUCT, "IADD3 R0, R32, 0x1, RZ", ALL, END], [], id="other registers"),
        pytest.param(
            [PRODUCT, PRODUCT, ALL_BUT_ONE, "STG.E.128 desc[UR4][R2.64], R28", ALL, END], [3], id="all but one"
        ),
        pytest.param([PRODUCT, OTHER, ALL_BUT_ONE, "FADD R0, R24, R25", ALL, END], [], id="the older one"),
        pytest.param([PRODUCT, OTHER, ALL_BUT_ONE, "FADD R0, R64, R25", ALL, END], [3], id="the newer one"),
        pytest.param([PRODUCT, "LDS.128 R28, [R2]", ALL, END], [1], id="written"),
        pytest.param([PRODUCT, "@!P0 MOV R2, R27", ALL, END], [1], id="under a condition"),
        pytest.param([FROM_REGISTERS, "IADD3 R2, R40, R41, RZ", ALL, END], [], id="a factor is read"),
        pytest.param([FROM_REGISTERS, "LDS.128 R40, [R2]", ALL, END], [1], id="a factor is written"),
        pytest.param([FROM_REGISTERS, "STS.128 [R2], R40", ALL, END], [], id="a factor is stored"),
        pytest.param([FROM_REGISTERS, "LDS.64 R38, [R40]", ALL, END], [], id="a factor is an address"),
    ],
)
def test_what_comes_too_early(lines, early):
    found = touched_in_flight(sass(*lines))
    assert [int(line.split()[0], 16) // 16 for line in found] == early


def test_a_loop_leaves_a_product_in_flight():
    """The last of a loop that waits for all but one: what follows may read its sums behind the last wait alone."""
    loop = [".L_x_1:", PRODUCT, ALL_BUT_ONE, "@P0 BRA `(.L_x_1)"]
    read = "F2FP.BF16.F32.PACK_AB R0, R31, R30"
    assert touched_in_flight(sass(*loop, ALL, read, END)) == []
    assert len(touched_in_flight(sass(*loop, read, ALL, END))) == 1


def test_a_branch_around_the_wait():
    lines = [PRODUCT, "@P0 BRA `(.L_x_1)", ALL, ".L_x_1:", "FADD R0, R24, R25", END]
    assert len(touched_in_flight(sass(*lines))) == 1


def test_what_is_no_machine_code():
    assert touched_in_flight("") == []
