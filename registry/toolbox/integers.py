"""Functions of whole numbers that know sizes which note what is asked of them (registry.contract.noted).

`math.gcd` wants the number itself, so that what was worked out with it would hold for this size alone. A host side says
`from registry.toolbox import integers as math`.
"""

from __future__ import annotations

from registry.contract.noted import gcd

__all__ = ["gcd"]
