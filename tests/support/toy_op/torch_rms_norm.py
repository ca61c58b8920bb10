"""A toy variant: rms_norm in plain torch."""

from registry import Design, Requires, Variant, hookimpl


def rms_norm(x, *, eps, weight, config):
    wide = x.float()
    found = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (found if weight is None else found * weight.float()).to(x.dtype)


@hookimpl
def registry_variants():
    requires = Requires(
        arch=("any",), dtypes=("float32", "bfloat16"), hidden=(1, 1 << 20), weight=True, deterministic=True
    )
    design = Design(dsl="aten")
    return [Variant("torch_rms_norm", op="rms_norm", run=rms_norm, requires=requires, design=design, summary="toy")]
