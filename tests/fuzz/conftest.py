"""How long the fuzzers look: a short seed of each in `make test`, the same every time; `make fuzz` looks for longer."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

_ALWAYS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
_SEED = {"max_examples": 10, "derandomize": True, "database": None, "phases": (Phase.explicit, Phase.generate)}
settings.register_profile("short", **_SEED, **_ALWAYS)
_WIDE = {"max_examples": 400, "phases": (Phase.explicit, Phase.reuse, Phase.generate)}
settings.register_profile("wide", **_WIDE, **_ALWAYS)
settings.register_profile("long", max_examples=300, **_ALWAYS)
settings.load_profile("short")
