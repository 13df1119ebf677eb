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
