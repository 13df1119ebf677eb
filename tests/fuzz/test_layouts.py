"""Random models, trained with random optimizers on random supported layouts, agree with one process.

    LAYOUT_CASES=200 python -m pytest tests/fuzz/test_layouts.py

A case follows from its number; a failing one prints the command that verifies it again. The suite trains four cases on
a layout of two ranks each; with LAYOUT_CASES that many, on two layouts of two or four ranks.
"""

import os
from random import Random

import pytest
from support.command_lines import CPU
from support.ranks import fork_server

from megatron.common.errors import ConfigError
from megatron.tools.verify import runs
from megatron.tools.verify.compare import Bounds
from megatron.tools.verify.request import Layout, Request, make_request, parse_layout, supported_layouts
from megatron.tools.verify.results import table, verify_layouts

CASES = int(os.environ.get("LAYOUT_CASES", 0))
ITERATIONS = 3
SIZES = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --vocab-size 92 "
    "--make-vocab-size-divisible-by 4 --mock-data --num-workers 0 --batch-size 2 --global-batch-size 8"
)
MODEL = (
    ("--swiglu", "--no-openai-gelu", "--ffn-hidden-size 48", ""),
    ("--normalization RMSNorm", "--qk-layernorm", "--apply-residual-connection-post-layernorm", "", ""),
    ("--position-embedding-type rope", "--position-embedding-type rope --rotary-percent 0.5", "", ""),
    ("--pre-tokens 3", "--pre-tokens 9,0", "", ""),
    (
        "--reset-attention-mask",
        "--reset-attention-mask --reset-position-ids --eod-mask-loss",
        "--eod-mask-loss",
        "",
        "",
    ),
    ("--group-query-attention --num-query-groups 2", "--group-query-attention --num-query-groups 1", "", ""),
    ("--disable-bias-linear", "--disable-bias-linear --add-qkv-bias", "", ""),
    ("--untie-embeddings-and-output-weights", ""),
    ("--checkpoint-activations", "--recompute-granularity selective", "--gradient-accumulation-fusion", "", "", ""),
    ("--init-method-std 0.1", "--init-method-std 0.006", "", ""),
)
"""Of each, one is drawn."""
RARE = (
    "--lora-rank 4",
    "--lora-rank 2 --lora-target query_key_value",
    "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --moe-aux-loss-coeff 0.1",
    "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type global_aux_loss",
    "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type aux_loss",
    *[""] * 5,
)
PARTITIONS = ("uniform", "parameters", "flops")
OPTIMIZERS = ("adam", "adam", "sgd", "sgd", "muon", "muon", "lion", "adafactor")


def words_of(seed: int) -> str:
    """The arguments of a random run, supported or not."""
    chance = Random(seed)
    words = [SIZES, f"--num-layers {chance.randint(2, 6)}", *map(chance.choice, (*MODEL, RARE))]
    words.append(f"--optimizer {chance.choice(OPTIMIZERS)} --lr {chance.choice((1e-4, 1e-3, 1e-2, 0.1))}")
    words.append(f"--weight-decay {chance.choice((0, 0.01, 0.1, 1.0))} --clip-grad {chance.choice((0, 0.4, 1.0))}")
    # In half precision rounding chooses other experts for some tokens.
    is_half = chance.random() < 0.2 and not any("--num-experts" in word for word in words)
    words.append("--bf16" if is_half else "")
    words.append(f"--warmup {chance.choice((0, 0.5))} --seed {seed}")
    if chance.random() < 0.2:
        words.append(f"--pipeline-partition {chance.choice(PARTITIONS)}")
    return " ".join(" ".join(words).split())


def case(number: int) -> tuple[Request, list[Layout]]:
    """A supported run, and the reference and layouts that it is trained on."""
    for seed in range(1000 * number, 1000 * number + 1000):
        words = words_of(seed)
        first = parse_layout("tp1-pp1-dp1") if "--pipeline-partition" in words else None
        try:
            request = make_request(words.split(), ITERATIONS, first, {**os.environ, **CPU})
        except ConfigError:
            continue
        processes = Random(seed).choice((2, 2, 4)) if CASES else 2
        return request, supported_layouts(request, processes, sample=2 if CASES else 1, seed=seed)
    raise AssertionError("no seed gives a supported run")


@pytest.mark.parametrize("number", range(CASES or 4))
def test_layouts_of_random_models_agree(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "rank_context", lambda device: fork_server())
    request, layouts = case(number)
    bounds = Bounds.of(request.run(layouts[0]).precision.dtype)
    results = list(verify_layouts(request, layouts, bounds, 240))
    names = " ".join(layout.name for layout in layouts)
    command = f"python tools/verify_layout.py --iterations {ITERATIONS} --layouts {names} {' '.join(request.arguments)}"
    print(command, table(results, bounds), sep="\n")
    assert all(result.agrees for result in results), [result.failure for result in results if result.failure]
