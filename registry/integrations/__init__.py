"""Doors for other people's code, each opt-in and in a file of its own; nothing in `registry` imports them.

    from registry.integrations import transformers
    transformers.enable()                                        # then: attn_implementation="kernel_registry"

A call that no variant can take runs as it would have without the door. That is logged once for each reason, and
`registry.record()` counts it under "elsewhere".
"""
