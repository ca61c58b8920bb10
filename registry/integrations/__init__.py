"""Doors for other people's code, each opt-in and in a file of its own; nothing in `registry` imports them.

    from registry.integrations import transformers
    transformers.enable()                                        # then: attn_implementation="kernel_registry"

What a door cannot bring to a variant goes where it would have gone without it. That is logged once a reason, and
`registry.record()` counts it under "elsewhere".
"""
