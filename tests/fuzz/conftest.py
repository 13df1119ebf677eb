"""Fuzzers: the same few examples in every run of the suite; as many new ones as ``FUZZ_EXAMPLES`` says on demand."""

import os

from hypothesis import HealthCheck, settings

_QUIET = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("suite", max_examples=30, derandomize=True, **_QUIET)
settings.register_profile("long", max_examples=int(os.environ.get("FUZZ_EXAMPLES", 1)), print_blob=True, **_QUIET)
settings.load_profile("long" if "FUZZ_EXAMPLES" in os.environ else "suite")
