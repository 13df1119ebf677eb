"""What the audit says of a run on sentences, beside the samples that it was trained on."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.common.errors import ConfigError
from megatron.tools.audit.case import open_case
from megatron.tools.audit.proof import prove
from megatron.tools.audit.samples import batch_as_text, batch_of, seen_up_to


def check_audit_of_sentences(folder: Path, iterations: int, samples: int) -> None:
    """Of a run of one process with ``samples`` in each iteration, whose folder has its checkpoint and its metrics."""
    case = open_case(folder / "checkpoint", {})
    assert prove(case.history, case.saved.skipped_samples, folder / "metrics")["proven"]
    counted: Counter[int] = Counter()
    for iteration in range(1, iterations + 1):
        batch = batch_of(case, iteration, None)
        assert len(batch["samples"]) == samples
        for row in batch["samples"]:
            assert len({piece["document"] for piece in row["pieces"]}) == 1
            for piece in row["pieces"]:
                start, stop = piece["tokens"]
                counted[piece["document"]] += stop - start
                # Every sentence of this corpus ends with a full stop, and has no other.
                first, end = piece["sentences"]
                assert end - first - 1 <= piece["text"].count(".") <= end - first
    assert ", sentence" in "".join(batch_as_text(batch, 20)) and "Traceback" not in str(batch)
    (seen,) = seen_up_to(case, iterations)
    assert {n: tokens for n, tokens in enumerate(seen.tokens.tolist()) if tokens} == counted
    config = {**case.saved.config, "model": case.saved.model | {"architecture": "BERT classifier"}}
    other = replace(case.saved, description={**case.saved.description, "config": config})
    with pytest.raises(ConfigError, match="is a BERT classifier: only samples of GPT-2, BERT, T5"):
        batch_of(replace(case, saved=other), 1, None)
