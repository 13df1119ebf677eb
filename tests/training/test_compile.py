"""``--compile`` at ZeRO 3, which frees the weights of a layer, with experts, which are not compiled, and in pieces."""

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import DeepSpeedEngine
from support.layouts import COMPARED, compare_metrics
from support.programs import TINY_MODEL, Programs, read_metrics
from support.training import pretrain
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.model.transformer import ParallelTransformerLayer

STEPS = (
    "--num-layers 2 --train-iters 3 --batch-size 1 --gas 2 --eval-iters 0 --log-interval 1 --attention-dropout 0"
    " --hidden-dropout 0"
)
FREED = {
    "zero_optimization": {
        "stage": 3,
        **dict.fromkeys(("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"), 0),
        **dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 0),
    }
}
"""No weight stays gathered."""
CASES = {
    "ZeRO 3": (FREED, "--position-embedding-type rope", 1),
    "experts": ({}, "--zero-stage 1 --num-experts 4 --expert-model-parallel-size 2", 2),
    "tensor parallel": (
        {},
        "--model-parallel-size 2 --sequence-parallel --tp-comm-overlap --zero-stage 2 --checkpoint-activations"
        " --reset-attention-mask --reset-position-ids",
        8,  # before and after attention within documents, which is not traced, with and without gradients
    ),
}
"""DeepSpeed's settings, flags, and graphs of a layer."""


@pytest.mark.parametrize("case", CASES)
def test_compiled_layers_train_like_plain_ones(run_ranks_once, programs: Programs, tmp_path: Path, case: str) -> None:
    settings, flags, graphs = CASES[case]
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    words = [*map(str, (*TINY_MODEL, *programs.data_arguments)), *STEPS.split(), *flags.split()]
    words += ["--deepspeed_config", str(tmp_path / "ds.json"), "--metrics-file"]
    for found, alive in run_ranks_once(2, train_both, words, tmp_path, time_limit=240):
        assert found == graphs
        assert not alive or case != "ZeRO 3", "weights stay gathered between the passes"
    plain, compiled = (read_metrics(tmp_path / name) for name in ("plain", "compiled"))
    compare_metrics(plain, compiled, COMPARED)


def train_both(words: list[str], folder: Path) -> tuple[int, int]:
    """Train without and with ``--compile``. Graphs, and weights that are still gathered when a backward pass begins."""
    graphs: list[fx.GraphModule] = []
    gathered: list[StorageWeakRef] = []
    alive, layer, backward = [0], ParallelTransformerLayer.forward, DeepSpeedEngine.backward

    def compiled(graph: fx.GraphModule, inputs: list) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager_decomp_partition")(graph, inputs)

    def forward(module: ParallelTransformerLayer, *arguments: Any) -> Any:
        gathered.extend(StorageWeakRef(weight.untyped_storage()) for weight in module.parameters())
        return layer(module, *arguments)

    def count(engine: DeepSpeedEngine, *arguments: Any, **options: Any) -> Any:
        alive[0] += sum(not storage.expired() for storage in gathered)
        gathered.clear()
        return backward(engine, *arguments, **options)

    assert pretrain([*words, str(folder / "plain")])[0] == 0
    with (
        patch("torch.compile", partial(torch.compile, backend=compiled)),
        patch.object(ParallelTransformerLayer, "forward", forward),
        patch.object(DeepSpeedEngine, "backward", count),
    ):
        code, output = pretrain([*words, str(folder / "compiled"), "--compile"])
    assert code == 0, output
    return len(graphs), alive[0]
