"""Settings of every suite. Fixtures live beside the tests that use them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Two shared cores make a deadline of milliseconds a coin toss; a hang still meets pytest's time limit.
settings.register_profile("bagelplane", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bagelplane")
