"""A version of DeepSpeed in which something that this suite overrides has another name or signature is one error."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.common.errors import ConfigError
from megatron.engines import overrides

ROOT = Path(__file__).parents[2]
RENAMED = """
import os, runpy, sys
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

DeepSpeedEngine.clip_gradients = DeepSpeedEngine.clip_fp32_gradients
del DeepSpeedEngine.clip_fp32_gradients
DeepSpeedZeroOptimizer._update_scale = lambda self, overflow: None
runpy.run_path(sys.argv[0], run_name="__main__")
"""
WORDS = (
    "--mock-data --vocab-size 64 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8"
    " --max-position-embeddings 8 --batch-size 1 --train-iters 1 --lr 1e-3"
).split()


def test_a_renamed_method_is_one_error_that_names_it() -> None:
    script = RENAMED.replace("sys.argv[0]", repr(str(ROOT / "pretrain_gpt2.py")))
    process = subprocess.run(
        [sys.executable, "-c", script, *WORDS], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert process.returncode == ConfigError.exit_code, process.stderr
    (line,) = (line for line in process.stderr.splitlines() if "error:" in line)
    for fact in (
        "DeepSpeed 0.19.8 is not supported",
        "DeepSpeedEngine.clip_fp32_gradients(self) is missing",
        "DeepSpeedZeroOptimizer._update_scale takes (self, overflow), and is known to take (self, has_overflow=False)",
        "install deepspeed==0.19.8",
    ):
        assert fact in line


def test_every_override_is_of_something_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.engines import build  # noqa: F401, which declares all of them

    overrides.check_overrides()
    monkeypatch.setattr(overrides, "_differences", [])
    overrides.expect(Path, "exists", "(self)")
    overrides.check_overrides()
    overrides.expect(Path, "exists", "(self, *, known)")
    with pytest.raises(ConfigError, match=r"Path.exists takes \(self.*\), and is known to take \(self, \*, known\)"):
        overrides.check_overrides()
