"""A run that compiles nothing needs no compiler; whatever compiles later finds the real one."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch
from torch import nn
from megatron.engines.compiler import import_compiler_late

import_compiler_late()
layer = nn.Linear(3, 3)
optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    layer(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
assert torch.compiler.disable(layer)(torch.ones(1, 3)).shape == (1, 3)
assert "torch._dynamo.eval_frame" not in sys.modules, "imported by an optimizer"
assert torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(2)).tolist() == [2, 2]
assert "torch._dynamo.eval_frame" in sys.modules
import torch._dynamo.testing
assert torch._dynamo.testing.CompileCounter().frame_count == 0
optimizer.step()
"""


def test_the_compiler_is_imported_by_what_compiles(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert process.returncode == 0, process.stderr


def test_the_compiler_looks_into_the_documents_of_no_layer(run_ranks_once) -> None:
    """Otherwise the first layer, built before anything is compiled, would be compiled again for every batch."""
    assert run_ranks_once(1, layers_whose_documents_are_traced) == [[False, False]]


def layers_whose_documents_are_traced() -> list[bool]:
    from benchmarks.measures.shapes import Shape
    from benchmarks.measures.suite import run_of
    from megatron.engines.build import build_engine
    from megatron.launch.distributed import distributed
    from megatron.model.transformer import ParallelTransformerLayer
    from megatron.parallel.tensor.random import model_parallel_manual_seed
    from megatron.training.learning_rates import annealing_lr

    shape = Shape(layers=2, hidden=16, heads=4, sequence=16, batch=2, vocabulary=21)
    run = run_of(shape, "--compile", "--reset-attention-mask")
    with distributed(run.parallel) as layout:
        model_parallel_manual_seed(1, layout)
        engine = build_engine(run, layout, annealing_lr(run))
        layers = [part for part in engine.module.modules() if isinstance(part, ParallelTransformerLayer)]
        return [not getattr(layer.attention.core.attention._limited, "_torchdynamo_disable", False) for layer in layers]
