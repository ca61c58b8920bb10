"""What each warp of a kernel does when: spans that it records of itself (toolbox.scopes), through Triton's Proton.

`anatomy` reads roles, registers and the memory plan out of a compiled kernel, on any machine; `record` runs a launch on
a GPU; `trace` reads what was recorded; `figures` adds it up; `timeline` draws it. Nothing here knows a kernel by name:
a third party's kernel that uses the scopes is shown as ours are.
"""
