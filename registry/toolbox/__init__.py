"""All that a kernel author imports. What for what:

call             `Call`, `Host`, `PerCall`, `Zeroes`, `Kept`: say once what is launched; `run`, `prepare` and `builds`
                 follow. Start here; an op's side of it is in its calls.py, such as registry.ops.attention.calls
launch           `StandIn`: a tensor's shape, strides, dtype and alignment without its memory. `Launcher` binds one
                 compiled kernel, for launches that a `Call` cannot say
matrices         strides of matrices and what TMA makes of them; boxes and blocks: their tensor maps, `in_tiles` and
                 `in_boxes` for Gluon, `in_blocks` for plain Triton
tensor_maps      addresses and geometry of host tensor descriptors; `Launcher` encodes a map once per address.
                 `rounded_to_tf32`: float32 that the TMA unit rounds while it loads
outputs          `allocator`: memory of one geometry, faster than `torch.empty`
counters         `zeroes`, `zeroed`: counters between thread blocks that a launch finds at zero and leaves at zero
complaints       `Complaint`: bits that a kernel leaves where an operand's values are wrong, for `registry.check()`
arithmetic       `to_tf32`, `activate`, `gelu`: where the plain way is wrong or slow; for Triton and Gluon
activations      `activate_as`: in Gluon, with no more digits than the results keep
stretches        equal shares of K for all CTAs
groups           `group_ends`, `group_starts`: groups of rows whose ends lie on the device
hopper           Gluon on sm90: TMA names of every triton since 3.6, shared-memory views, rings of tiles with mbarriers,
                 named barriers
designs          `specialised`: the traits of a kernel with a producer, as a Variant says them
builds           `Build`, `compile_build`, `inspect`: compile without a GPU; registers, spills, instructions, occupancy
sass, in_flight  loops and opcodes of machine code, for tests of what the compiler made; what touches sums too early
wgmma            products of tensor cores over any multiple of 8 columns, which Triton's own does not take
finish           bias and activation of such products' accumulators, in registers
clusters         pairs of CTAs that share what they load
drawn            tiles drawn from a counter, so that a CTA which is done takes the next
costs            `unknown_cost`: what a host side guesses of a config that it does not know
sections         heads whose tiles take turns, so that what they read stays in L2
scopes           named spans of a kernel for `kreg profile`
operands         what a kernel's arguments are where they are neither tensors nor fixed numbers; `call` has their names
integers         `gcd` for host sides: of sizes that may be noted, so that launches of other sizes can be made of one
capturing        whether a CUDA graph is being captured
triton_internals what the launcher knows of Triton's inside; kernels have no use for it

A Triton kernel needs `call` and the calls of its op; a Gluon kernel `hopper` besides; both have `arithmetic`. Tests
of a kernel read its machine code through `builds`. See plugins/triton_fa2/host.py for a plain example, and
plugins/gluon_matmul_ws/host.py for tensor maps, workspaces and counters.
"""
