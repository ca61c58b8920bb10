"""The ping-pong: consumer warp groups issue their matrix products in turns, by named barriers."""

import enum

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.toolbox import scopes
from registry.toolbox.hopper import FREE_BARRIERS, barrier_asm


class Turn(enum.IntEnum):
    """Whose turn a hardware barrier announces."""

    GROUP_0, GROUP_1, GROUP_2 = FREE_BARRIERS[:3]


PINGPONG_THREADS = 256  # the group that waits and the one that hands over


@gluon.constexpr_function
def _pingpong(verb, group):
    return barrier_asm(verb, Turn[f"GROUP_{int(group)}"], PINGPONG_THREADS)


@gluon.jit
def take_turn(GROUP: gl.constexpr, T: gl.constexpr):
    """Wait until it is GROUP's turn to issue its matrix products."""
    if T.pingpong != "off":
        scopes.enter("wait turn")
        gl.inline_asm_elementwise(_pingpong("sync", GROUP), "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        scopes.leave("wait turn")


@gluon.jit
def give_turn(GROUP: gl.constexpr, T: gl.constexpr):
    """Let GROUP go; does not wait."""
    if T.pingpong != "off":
        gl.inline_asm_elementwise(_pingpong("arrive", GROUP), "=r", [], dtype=gl.int32, is_pure=False, pack=1)
