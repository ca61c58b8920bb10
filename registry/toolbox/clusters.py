"""Pairs of CTAs for Gluon kernels: what triton 3.6 has no name for, launched as a cluster by `Call(cluster=2)`.

Triton compiles such a kernel as for single CTAs and sees none of this: TMA loads that bring a box to both CTAs of a
pair (multicast), arrivals at the other's barriers, and with them the barriers, whose addresses they need.

bars         a full and an empty barrier, 16 bytes, for each stage, in shared memory that the kernel sets aside, at an
             address that it knows (`wgmma.shared_memory()` and on). The default partition calls `init_pair_barriers`
`meet`       all threads of both CTAs do, before the first use of the other's barriers. Every warp has to come, so
             partitions fill up their warp groups: `bystander` for those that have nothing else to do. A launch without
             clusters does with the hardware barrier 0 instead, which is that of Triton's default partition: an illegal
             instruction. So a kernel that is launched alone too meets nobody then
producer     waits for an empty slot (`wait_empty`), says how many bytes will come (`expect_at`), loads (`load_box`). In
             the end it waits until the other CTA has let go of all that was loaded (`wait_all_empty`): a CTA must not
             leave while an arrival at its barriers is on its way, which is a fault, and a rare one
consumers    `wait_at(slot, phase)`; each warp of them lets go of it in both CTAs (`release_in_both`), for the next
             block overwrites both
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.toolbox.hopper import group_barrier


@gluon.constexpr_function
def _init_asm(readers):
    """By one thread: barriers at $1, the full one for the producer, the empty one for each reading warp."""
    return f"""{{
        .reg .pred p; .reg .b32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        @p mbarrier.init.shared::cta.b64 [$1], 1;
        @p mbarrier.init.shared::cta.b64 [$1 + 8], {readers};
        mov.b32 $0, 0;
    }}"""


@gluon.constexpr_function
def _expect_asm(count):
    return f"""{{
        .reg .pred p; .reg .b32 t;
        mov.u32 t, %laneid;
        setp.eq.u32 p, t, 0;
        @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {count};
        mov.b32 $0, 0;
    }}"""


@gluon.constexpr_function
def _load_asm(parameter, both):
    """A box of the tensor map in that parameter to shared memory at $1, for the barrier $4."""
    kind, mask = (".multicast::cluster", ", m") if both else ("", "")
    copy = f"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes{kind}"
    return f"""{{
        .reg .pred p; .reg .b32 t; .reg .b64 d; .reg .b16 m;
        mov.u32 t, %laneid;
        setp.eq.u32 p, t, 0;
        mov.b64 d, {parameter};
        cvta.param.u64 d, d;
        mov.b16 m, 3;
        @p {copy} [$1], [d, {{$2, $3}}], [$4]{mask};
        mov.b32 $0, 0;
    }}"""


_WAIT: gl.constexpr = gl.constexpr("""{
    .reg .pred done;
    again:
    mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
    @!done bra.uni again;
    mov.b32 $0, 0;
}""")


@gluon.constexpr_function
def _release_asm(both):
    """By the thread of a warp whose $2 is 0. What is let go of was only read: `.release.cluster` would flush all that
    was written, which takes a microsecond each time."""
    if not both:
        return """{
            .reg .pred p;
            setp.eq.u32 p, $2, 0;
            @p mbarrier.arrive.shared::cta.b64 _, [$1];
            mov.b32 $0, 0;
        }"""
    return """{
        .reg .pred p; .reg .b32 here, there;
        setp.eq.u32 p, $2, 0;
        mapa.shared::cluster.u32 here, $1, 0;
        mapa.shared::cluster.u32 there, $1, 1;
        @p mbarrier.arrive.shared::cluster.b64 _, [here];
        @p mbarrier.arrive.shared::cluster.b64 _, [there];
        mov.b32 $0, 0;
    }"""


_MEET: gl.constexpr = gl.constexpr("barrier.cluster.arrive.relaxed; barrier.cluster.wait; mov.b32 $0, 0;")
_FENCE: gl.constexpr = gl.constexpr("fence.mbarrier_init.release.cluster; mov.b32 $0, 0;")


@gluon.jit
def init_pair_barriers(bars, STAGES: gl.constexpr, READERS: gl.constexpr):
    """READERS: warps of both CTAs that release a slot."""
    ASM: gl.constexpr = _init_asm(READERS)
    for i in gl.static_range(STAGES):
        gl.inline_asm_elementwise(ASM, "=r,r", [bars + 16 * i], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(_FENCE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    group_barrier()


@gluon.jit
def meet(BOTH: gl.constexpr):
    """All threads of a pair wait for each other; nobody does where there is no pair."""
    if BOTH:
        gl.inline_asm_elementwise(_MEET, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rank():
    """Which of the pair this CTA is."""
    return gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def wait_at(barrier, phase):
    gl.inline_asm_elementwise(_WAIT, "=r,r,r", [barrier, phase], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_empty(bars, number, STAGES: gl.constexpr):
    """The slot for this block of all, the first of which is 0."""
    wait_at(bars + 16 * (number % STAGES) + 8, ((number // STAGES) & 1) ^ 1)


@gluon.jit
def wait_all_empty(bars, count, STAGES: gl.constexpr, BOTH: gl.constexpr):
    """After so many blocks, the producer's last act: nobody arrives any more. Meeting once more does not do: arrivals
    that were sent before may come after it, and one that waited for them would flush all that was stored."""
    if BOTH:
        for more in range(STAGES):
            wait_empty(bars, count + more, STAGES)


@gluon.jit
def release_in_both(barrier, lane, BOTH: gl.constexpr):
    """This warp, whose threads' numbers in it are `lane`, is done with a slot; or only in this CTA."""
    ASM: gl.constexpr = _release_asm(BOTH)
    gl.inline_asm_elementwise(ASM, "=r,r,r", [barrier, lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def expect_at(barrier, COUNT: gl.constexpr):
    ASM: gl.constexpr = _expect_asm(COUNT)
    gl.inline_asm_elementwise(ASM, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_box(to, column, row, barrier, PARAMETER: gl.constexpr, BOTH: gl.constexpr):
    """By one warp, a box through the tensor map in that parameter of the compiled kernel (`name_param_0`; each map is
    followed by the sizes and the strides of its tensor); to the same place in both CTAs where BOTH."""
    ASM: gl.constexpr = _load_asm(PARAMETER, BOTH)
    gl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [to, column, row, barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bystander():
    """Warps that only make up a warp group."""
    meet(True)
