"""What each warp of a kernel does when, from spans that the kernel marks (toolbox.scopes) and Triton's Proton records.

`anatomy` reads roles, registers and the memory plan out of a compiled kernel, on any machine; `record` runs a launch on
a GPU; `trace` reads what was recorded; `figures` adds it up; `timeline` draws it. Nothing here knows a kernel by name:
any kernel that marks its scopes can be shown.
"""
