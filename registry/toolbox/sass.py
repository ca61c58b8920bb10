"""Loops of a kernel's machine code, read from nvdisasm's text: what runs in the hot loop, and what spills there."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Loop", "flow", "loop_spills", "loops", "opcodes"]

TENSOR_CORE = ("HGMMA", "QGMMA", "IGMMA", "BGMMA", "HMMA", "IMMA", "QMMA", "DMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA")
SPILLS = ("LDL", "STL")


@dataclass(frozen=True)
class Loop:
    """A natural loop of the machine code: its first address, opcode counts, and the spill instructions inside it."""

    address: int
    instructions: int
    counts: Mapping[str, int]
    spills: tuple[str, ...]
    innermost: bool

    @property
    def tensor_core(self) -> int:
        return sum(self.counts.get(name, 0) for name in TENSOR_CORE)


def loops(sass: str) -> list[Loop]:
    """The natural loops of nvdisasm's text, by address; ``innermost``: no loop with tensor-core work lies inside."""
    code, targets = flow(sass)
    found = []
    for head, body in _natural_loops(targets):
        body_code = [code[i] for i in sorted(body)]
        counts = Counter(opcode.split(".")[0] for _, opcode, _ in body_code)
        spills = tuple(f"{at:#06x} {text}" for at, opcode, text in body_code if opcode.split(".")[0] in SPILLS)
        found.append((body, Loop(code[head][0], len(body), counts, spills, True)))
    busy = [body for body, loop in found if loop.tensor_core]
    marked = [Loop(x.address, x.instructions, x.counts, x.spills, not any(b < body for b in busy)) for body, x in found]
    return sorted(marked, key=lambda loop: (loop.address, -loop.instructions))


def loop_spills(sass: str, *, innermost: bool = True) -> list[str]:
    """Spill loads and stores inside loops that run tensor-core instructions: the ones that cost. Empty is good.

    ``innermost=False`` also lists those between the tiles of a persistent kernel.
    """
    hot = [loop for loop in loops(sass) if loop.tensor_core and (loop.innermost or not innermost)]
    return list(dict.fromkeys(line for loop in hot for line in loop.spills))


_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(.*?)\s*;")


def opcodes(sass: str) -> Counter[str]:
    """How often each instruction occurs, by the first part of its opcode."""
    return Counter(opcode.split(".")[0] for _, opcode, _ in flow(sass)[0])


@functools.lru_cache(maxsize=8)
def flow(sass: str) -> tuple[list[tuple[int, str, str]], list[list[int]]]:
    """Instructions as (address, opcode, text), and the instructions that can follow each."""
    code: list[tuple[int, str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if match := _LINE.match(line):
            text = match[2]
            opcode = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]
            code.append((int(match[1], 16), opcode, text))
        elif match := re.match(r"\s*(\.L_\w+):", line):
            labels[match[1]] = len(code)
    joins: dict[str, int] = {}
    follow: list[list[int]] = []
    for i, (_, opcode, text) in enumerate(code):
        name = opcode.split(".")[0]
        goals = [labels[label] for label in re.findall(r"\.L_\w+", text) if labels.get(label, len(code)) < len(code)]
        ahead = [i + 1] if i + 1 < len(code) else []
        if name == "BSSY" and goals:
            joins[text.replace(",", " ").split()[-2]] = goals[0]
        if name in ("BRA", "BRX", "JMP", "BRXU", "JMX"):
            always = not text.startswith("@") and ".DIV" not in opcode and not re.search(r"\bU?P\d", text)
            follow.append(goals if always else goals + ahead)
        elif name == "BSYNC" and text.split()[-1] in joins:
            follow.append([joins[text.split()[-1]]])
        elif name in ("EXIT", "RET") and not text.startswith("@"):
            follow.append([])
        else:
            follow.append(ahead)
    return code, follow


def _natural_loops(follow: list[list[int]]) -> list[tuple[int, frozenset[int]]]:
    """(head, body) of each natural loop of a flow graph whose node 0 is the entry."""
    before: list[list[int]] = [[] for _ in follow]
    order, seen, stack = [], {0}, [(0, iter(follow[0]))] if follow else []
    while stack:
        node, rest = stack[-1]
        for goal in rest:
            before[goal].append(node)
            if goal not in seen:
                seen.add(goal)
                stack.append((goal, iter(follow[goal])))
                break
        else:
            order.append(stack.pop()[0])
    order.reverse()
    rank = {node: i for i, node in enumerate(order)}
    parent = {0: 0}
    changed = True
    while changed:  # immediate dominators, by intersecting those of the predecessors until nothing moves
        changed = False
        for node in order[1:]:
            best = None
            for other in before[node]:
                if other in parent:
                    best = other if best is None else _meet(best, other, parent, rank)
            if best is not None and parent.get(node) != best:
                parent[node], changed = best, True
    bodies: dict[int, set[int]] = {}
    for node in order:
        for head in follow[node]:
            if rank[head] <= rank[node] and _meet(head, node, parent, rank) == head:
                body, work = bodies.setdefault(head, {head}), [node]
                while work:
                    at = work.pop()
                    if at not in body:
                        body.add(at)
                        work += before[at]
    return [(head, frozenset(body)) for head, body in bodies.items()]


def _meet(a: int, b: int, parent: Mapping[int, int], rank: Mapping[int, int]) -> int:
    while a != b:
        while rank[a] > rank[b]:
            a = parent[a]
        while rank[b] > rank[a]:
            b = parent[b]
    return a
