"""What is fixed when a kernel is compiled, as one constant: kernels and the functions that they call pass it on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VarlenSwitches:
    D: int
    V: int
    """Head dims of q and k, and of v."""
    PADDED_D: int
    PADDED_V: int
    """The powers of two that tiles have."""
    GROUP: int
    """Query heads for each key head."""
    BLOCK_M: int
    BLOCK_N: int
    CHUNK: int
    """Sequences looked at together."""
    FEW: bool
    """There are no more."""
    PACKED: bool
    """Keys lie one sequence after the other; else each sequence has rows of its own, or pages."""
    PAGE: int
    """Keys in a page; 0: no pages."""
    PER_HEAD: bool
    """Keys and values have scales: one for each key head, or just one (with a stride of 0)."""
    PER_KEY: bool
    """Or one for each key of each key head."""
    PAIRED: bool
    """8-bit values are read two columns at a time, as numbers of 16 bits: see keys.py."""
    INT8: bool
    PTX: bool
    """They are taken apart in PTX, which the interpreter has not."""
    Q_UNIT: int
    K_UNIT: int
    """Elements that strides of q and out, and of k and v, are counted in."""
    WIDE: bool
    """A key's stride is so large that offsets inside a block need 64 bits."""
    TF32: bool
    LEFT: bool
    RIGHT: bool
    """Whether the mask hides keys on that side of the diagonal."""
    CAP: bool
    ALIBI: bool
    SINKS: bool
    SIGNED: bool
    """The scale may be negative: it has to be applied before a maximum is taken."""
    LSE: bool
    COMPLAIN: bool
    """The kernel says where lengths and pages are not what they must be."""
    Q_WIDE: bool = True
    """Strides of q and out are so large that offsets inside a tile need 64 bits."""
    GRAD_LSE: bool = False
    WANT_DK: bool = True
    WANT_DV: bool = True
    ROWS: int = 16
    """Rows that a partial result needs: a power of two, and no more than BLOCK_M."""
    AT_ONCE: int = 1
    """Partial results that are in flight together."""
    PDL: bool = False
    """The launch may begin before the kernel ahead of it has ended."""
