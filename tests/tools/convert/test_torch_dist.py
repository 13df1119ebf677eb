"""Checkpoints that megatron-core itself saves, in its torch_dist format and in the classic one.

Both packages are called ``megatron``, so the other one runs in a process that does not see ours.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fuzzing import Attack
from support.programs import Programs
from support.whole_models import logits_and_weights
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron.common.errors import CheckpointError
from megatron.tools.convert.from_megatron import GivenModel, full_model
from megatron.tools.convert.load_and_save import write_checkpoint
from megatron.tools.convert.megatron_files import read_shards
from megatron.tools.convert.torch_dist import read_torch_dist

SAVE = """
import os, sys
from argparse import Namespace
from contextlib import nullcontext
from types import SimpleNamespace
import torch
torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None
torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
parallel_state.initialize_model_parallel(1, 1)
torch.manual_seed(1)
gpt = dict(normalization="LayerNorm", add_bias_linear=True)
llama = dict(normalization="RMSNorm", add_bias_linear=False, num_query_groups=2, gated_linear_unit=True,
             activation_func=torch.nn.functional.silu, kv_channels=12, layernorm_epsilon=1e-3)
learned = dict(position_embedding_type="learned_absolute", share_embeddings_and_output_weights=True)
rotary = dict(position_embedding_type="rope", rotary_base=500, rotary_percent=0.5,
              share_embeddings_and_output_weights=False)
said = dict(num_attention_heads=4, num_layers=3, vocab_size=92, max_position_embeddings=16,
            attention_backend=AttnBackend.auto, params_dtype=torch.float32, bias_gelu_fusion=False)
said_llama = dict(swiglu=True, group_query_attention=True, num_query_groups=2, norm_epsilon=1e-3, rotary_base=500,
                  rotary_percent=0.5, position_embedding_type="rope", untie_embeddings_and_output_weights=True)
tokens = torch.tensor([[3, 90, 41, 7, 0, 91, 12, 12], [60, 1, 2, 3, 4, 5, 6, 7]])
for name, sizes, positions, args in (("gpt", gpt, learned, said), ("llama", llama, rotary, said | said_llama)):
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3, persist_layer_norm=False, **sizes)
    spec = get_gpt_layer_local_spec(normalization=sizes["normalization"])
    model = GPTModel(config, spec, vocab_size=96, max_sequence_length=16, **positions).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    with torch.no_grad():
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
        torch.save(model(tokens, torch.arange(8).expand(2, -1), mask), name + "-logits.pt")
    rest = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 7}
    for folder in (name + "-torch_dist", name + "-classic"):
        os.makedirs(folder + ("/iter_0000007/mp_rank_00" if "classic" in folder else "/iter_0000007"))
        open(folder + "/latest_checkpointed_iteration.txt", "w").write("7")
    sharded = {"model": model.sharded_state_dict(), **rest}
    dist_checkpointing.save(sharded, name + "-torch_dist/iter_0000007", ("torch_dist", 1))
    torch.save({"model": model.state_dict(), **rest}, name + "-classic/iter_0000007/mp_rank_00/model_optim_rng.pt")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders KIND-FORMAT of megatron-core, and the logits KIND-logits.pt of its models."""
    folder, package = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("megatron-core")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", package]
    subprocess.run([*install, "megatron-core==0.16.1"], check=True)
    command, environment = [sys.executable, "-W", "ignore", "-c", SAVE], {**os.environ, "PYTHONPATH": str(package)}
    subprocess.run(command, cwd=folder, env=environment, check=True)
    return folder


@pytest.mark.parametrize("form", ["torch_dist", "classic"])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_logits_are_those_of_megatron_core(run_ranks, tmp_path: Path, saved: Path, kind: str, form: str):
    model = full_model(read_shards(saved / f"{kind}-{form}"), GivenModel())
    write_checkpoint(tmp_path, model, vocab_file=None, merge_file=None)
    ((logits, _),) = run_ranks(1, logits_and_weights, tmp_path)
    expected = torch.load(saved / f"{kind}-logits.pt", weights_only=True)[..., :92]
    assert expected.std() > 0.5
    torch.testing.assert_close(logits[..., :92], expected, rtol=0, atol=1e-5)


def test_metadata_name_the_folder_they_were_saved_in(tmp_path: Path):
    """As a path, of which Python before 3.12 writes each part."""
    checkpoint.save(weights := {"a": torch.rand(2, 3)}, checkpoint_id=tmp_path / "iter_0000007")
    assert read_torch_dist(tmp_path / "iter_0000007")["a"].equal(weights["a"])


def replaced(old: bytes, new: bytes) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = (folder / ".metadata").read_bytes()
        assert old in content and len(old) == len(new)
        (folder / ".metadata").write_bytes(content.replace(old, new))

    return apply


def truncated(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def fifo(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return apply


def with_metadata(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = pickle.loads((folder / ".metadata").read_bytes())
        change(content.state_dict_metadata["output_layer.weight"])
        (folder / ".metadata").write_bytes(pickle.dumps(content))

    return apply


def table_of(rows: int) -> Callable[[Any], None]:
    return lambda entry: setattr(entry, "size", torch.Size([rows, 32]))


def parts(*boxes: tuple[int, int, int, int]) -> Callable[[Any], None]:
    """Parts of (first row, first column, rows, columns)."""
    chunks = [ChunkStorageMetadata(torch.Size(box[:2]), torch.Size(box[2:])) for box in boxes]
    return lambda entry: setattr(entry, "chunks", chunks)


def unsafe_part(folder: Path) -> None:
    """The data of a part are a pickle that makes a folder."""
    torch.save(Attack(folder.parent / "marker"), folder / "new.distcp")
    content = pickle.loads((folder / ".metadata").read_bytes())
    info = next(info for key, info in content.storage_data.items() if key.fqn == "output_layer.weight")
    info.relative_path, info.offset, info.length = "new.distcp", 0, (folder / "new.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(content))


NOT_TILED = "the parts of output_layer.weight do not fill [96, 32]"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "harm": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Attack(folder.parent / "marker"))),
        "it asks for posix.mkdir, which could run code",
    ),
    "a function of a module of torch": (
        lambda folder: (folder / ".metadata").write_bytes(b"ctorch.distributed.checkpoint.filesystem\nos\n."),
        "which could run code",
    ),
    "half of the weights": (truncated("__0_1.distcp"), "__0_1.distcp cannot be read"),
    "a file is missing": (lambda folder: (folder / "__0_1.distcp").unlink(), "__0_1.distcp is missing"),
    "a FIFO": (fifo("__0_1.distcp"), "__0_1.distcp cannot be read (a FIFO, not a file)"),
    "harm in a part": (unsafe_part, "new.distcp asks for posix.mkdir, which could run code"),
    "a file elsewhere": (replaced(b"__0_0.distcp", b"../../secret"), "'../../secret', which is not in the same folder"),
    "a table too large": (with_metadata(table_of(1 << 40)), "which is more than the .distcp files there hold"),
    "no part": (with_metadata(parts()), NOT_TILED),
    "a gap, and an overlap of the same size": (with_metadata(parts((0, 0, 48, 32), (0, 0, 48, 32))), NOT_TILED),
    "a part that is out of bounds": (with_metadata(parts((0, 8, 96, 32))), NOT_TILED),
    "parts that overlap and are out of bounds": (with_metadata(parts((0, 0, 64, 32), (64, -1, 32, 32))), NOT_TILED),
    "a part of negative sizes": (with_metadata(parts((96, 32, -96, -32))), NOT_TILED),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_hostile_and_damaged_folders_are_refused(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, fault: str
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "spoilt"
    folder.mkdir()
    for file in (saved / "llama-torch_dist" / "iter_0000007").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    spoil, message = FAULTS[fault]
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        read_shards(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "marker").exists()


def test_the_tool_says_what_it_leaves_and_refuses_damage(programs: Programs, tmp_path: Path, saved: Path):
    command = ("tools/convert_checkpoint.py", "from-megatron")
    finished = programs.warm(1, *command, saved / "llama-torch_dist", "--output", tmp_path / "ours").ok()
    assert "not taken over: optimizer" in finished.output
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".metadata").write_bytes(b"")
    refused = programs.warm(1, *command, tmp_path / "theirs", "--output", tmp_path / "other")
    assert refused.returncode == 4 and "Traceback" not in refused.output
