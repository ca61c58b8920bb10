"""Hopper's products that are still on their way: what touches their registers before anybody waited for them.

A warp group issues products (wgmma) and goes on; their sums are there when it has waited for the group that they belong
to. The assembler may move what reads the sums before that wait: so triton 3.6's did in 6 of 25 kernels of a draft that
waited for all groups but one, then for all, and converted single elements. Some results were wrong. A test of values
may miss it, for the products are often done by then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from registry.toolbox.sass import flow

__all__ = ["touched_in_flight"]

_PRODUCT = re.compile(r"[HQIB]GMMA\.64x(\d+)x\d+\.(\w+)")
_REGISTER = re.compile(r"\bR(\d+)\b")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
DEPTH = 6
"""Groups that are told apart; older ones count as waited for."""

Group = tuple[frozenset[int], frozenset[int]]
"""Registers that products write, and such as they read."""
State = tuple[Group, ...]
"""The products of no group yet, then the groups in flight, newest first."""
_NONE: Group = (frozenset(), frozenset())


def touched_in_flight(sass: str) -> list[str]:
    """Instructions that read or write sums of products in flight, or write what those read. Empty is good."""
    code, follow = flow(sass)
    if not code:
        return []
    states: dict[int, State] = {0: (_NONE,) * (1 + DEPTH)}
    found, work = {}, [0]
    while work:
        at = work.pop()
        address, opcode, text = code[at]
        if _touches(states[at], opcode, text):
            found[at] = f"{address:#06x} {text}"
        after = _after(states[at], opcode, text)
        for goal in follow[at]:
            known = states.get(goal)
            joined = after if known is None else _both(known, after)
            if joined != known:
                states[goal] = joined
                work.append(goal)
    return [found[at] for at in sorted(found)]


def _after(state: State, opcode: str, text: str) -> State:
    if match := _PRODUCT.match(opcode):
        given = _operands(text)
        sums = _run(given[0], int(match[1]) // (4 if match[2] == "F16" else 2))
        factor = _run(given[1], 4) if _REGISTER.match(given[1]) else frozenset()
        opened = (state[0][0] | sums, state[0][1] | factor)
        return (_NONE, opened, *state[1:-1]) if "gsb0" in text else (opened, *state[1:])
    if opcode.startswith("WARPGROUP.DEPBAR"):
        left = int(text.split(",")[-1], 16)
        return (state[0], *state[1 : 1 + left], *(_NONE,) * (DEPTH - left))
    return state


def _both(one: State, other: State) -> State:
    return tuple((a[0] | b[0], a[1] | b[1]) for a, b in zip(one, other, strict=True))


def _touches(state: State, opcode: str, text: str) -> bool:
    if state == (_NONE,) * (1 + DEPTH) or _PRODUCT.match(opcode) or opcode.startswith("WARPGROUP"):
        return False
    written, mentioned = set(), set()
    for place, register in _registers(opcode, text):
        mentioned.add(register)
        if place == 0 and not opcode.startswith(("ST", "RED", "ATOM")):
            written.add(register)
    return any(mentioned & sums or written & factors for sums, factors in state)


def _registers(opcode: str, text: str) -> Iterator[tuple[int, int]]:
    """Each register of an instruction, with the operand that it is of; an address's are of none."""
    wide = 4 if ".128" in opcode else 2 if ".64" in opcode or ".WIDE" in opcode else 1
    for place, operand in enumerate(_operands(text)):
        address = "[" in operand
        for register in _REGISTER.findall(operand):
            for one in _run(register, 1 if address else wide):
                yield -1 if address else place, one


def _operands(text: str) -> list[str]:
    _, _, operands = _PREDICATE.sub("", text).partition(" ")
    return [operand.strip() for operand in operands.split(",")]


def _run(register: str, count: int) -> frozenset[int]:
    first = int(register.lstrip("R"))
    return frozenset(range(first, first + count))
