"""What becomes of the flags of the classic suites, which a script written for one of them may contain. No torch here.

The suites are Megatron-LM (training GPT, BERT and T5), Megatron-DeepSpeed and DeepSpeed's 3D-parallelism example
(Megatron-LM v1.1.5). Most of their flags are flags here, under the same name or as an alias in ``megatron/config``. The
tables contain the other flags, in four kinds: replaced by a flag of another name; fulfilled, where it happens in any
case; ignored, with a warning; and refused. Each table maps a text, which the user reads, to the flags it applies to. A
name may end with ``*`` for a family of flags, or with ``=value`` for one value of a flag; the most specific name
counts. docs/classic-flags.md is generated from the tables.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from megatron.cli.classic_flags.accepted import FULFILLED, IGNORED, REPLACED
from megatron.cli.classic_flags.refused import REFUSED


class Outcome(NamedTuple):
    """What becomes of a classic flag."""

    kind: str
    """``replaced``, ``fulfilled``, ``ignored`` or ``refused``."""
    text: str
    """The flag that replaces it; what happens in any case, or instead; why it is refused, and what to use."""


def _by_name(kind: str, names_by_text: Mapping[str, str]) -> dict[str, Outcome]:
    return {name: Outcome(kind, text) for text, names in names_by_text.items() for name in names.split()}


OUTCOMES: dict[str, Outcome] = {
    **_by_name("refused", REFUSED),
    **_by_name("ignored", IGNORED),
    **_by_name("fulfilled", FULFILLED),
    **_by_name("replaced", REPLACED),
}
"""Name of a flag without dashes, of one of its values (``name=value``) or of a family (``name-*``) to its outcome."""


def outcome_of(name: str, values: Sequence[str]) -> Outcome | None:
    """The outcome of the flag ``name``, without dashes, with ``values``; None if no classic suite has it."""
    for key in (f"{name}={' '.join(values)}", name):
        if key in OUTCOMES:
            return OUTCOMES[key]
    return next((outcome for key, outcome in OUTCOMES.items() if "*" in key and fnmatchcase(name, key)), None)
