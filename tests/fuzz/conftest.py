"""Fuzzers: the same few examples in every run of the suite; as many new ones as ``FUZZ_EXAMPLES`` says on demand.

Only on demand is the smallest example searched that fails, which may take minutes.
"""

import os

from hypothesis import HealthCheck, Phase, settings

_QUIET = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("suite", max_examples=20, derandomize=True, phases=[Phase.explicit, Phase.generate], **_QUIET)
settings.register_profile("long", max_examples=int(os.environ.get("FUZZ_EXAMPLES", 1)), print_blob=True, **_QUIET)
settings.load_profile("long" if "FUZZ_EXAMPLES" in os.environ else "suite")
