"""Command lines that break one rule each, in a file for each module of megatron/cli/validation.

A row is the name of the rule, a command line that breaks it alone, the start of its message, and what fixes it.
"""

from support.broken_rules import data, encoder_decoder, experts, layout, memory, model, output, pipeline, training

Row = tuple[str, str, str, str | None]

BROKEN: list[Row] = [
    *layout.BROKEN,
    *pipeline.BROKEN,
    *memory.BROKEN,
    *model.BROKEN,
    *training.BROKEN,
    *experts.BROKEN,
    *data.BROKEN,
    *encoder_decoder.BROKEN,
    *output.BROKEN,
]
WARNED: list[Row] = [*memory.WARNED, *experts.WARNED, *data.WARNED, *output.WARNED]
"""The same, of rules that only warn."""
