"""Triton's interpreter, mended as the conformance kit mends it: to be imported where TRITON_INTERPRET=1."""

from registry.testing import interpreted

assert not interpreted.mend()
