"""One hypothesis profile: no deadline (shared machines), reproducible in CI, more examples with HYPOTHESIS_PROFILE=thorough."""

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile(
    "default", max_examples=50, derandomize=bool(os.environ.get("CI")), database=None, print_blob=True, **_COMMON
)
settings.register_profile("thorough", max_examples=1000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
