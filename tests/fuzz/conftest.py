"""How many examples, and which: the same few in every ordinary run, as many new ones as the environment asks for."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, max_examples=30, suppress_health_check=QUIET
)
settings.register_profile(
    "long", deadline=None, max_examples=int(os.environ.get("FUZZ_EXAMPLES", 0)) or 1000, suppress_health_check=QUIET
)
settings.load_profile("long" if "FUZZ_EXAMPLES" in os.environ else "fixed")
