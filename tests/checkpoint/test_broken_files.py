"""Each kind of file of a checkpoint, damaged in each way, is detected before a tensor is read, and named."""

import errno
import io
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from support.fuzzing import Attack
from support.programs import TINY_MODEL, Programs

from megatron.checkpoint import manifest
from megatron.checkpoint.checks import form_errors
from megatron.checkpoint.files import Record
from megatron.checkpoint.manifest import check_content, read_text, write_manifest
from megatron.checkpoint.stored import StoredFile
from megatron.checkpoint.tensor_files import read_file, write_file
from megatron.common.errors import CheckpointError, ResourceError
from megatron.tools.convert.megatron_files import _read
from megatron.tools.convert.torch_dist import _Unpickler

LAYOUT = "--pipe-parallel-size 2 --zero-stage 1 --bf16".split()
SETTINGS = "--train-iters 4 --batch-size 2 --gas 2 --eval-iters 0".split()
# A kind of file, one of it, and another of its kind.
FILES = {
    "weights of a layer": ("layer_03-model_00-model_states.pt", "layer_04-model_00-model_states.pt"),
    "states of a rank": ("mp_rank_01_model_states.pt", "mp_rank_00_model_states.pt"),
    "optimizer": ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"),
    "random streams": ("rng_state_00001.pt", "rng_state_00000.pt"),
    "description": ("run.json", "../global_step1/run.json"),
    "manifest": ("manifest.json", "../global_step1/manifest.json"),
}


def _truncate(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def _flip(file: Path, other: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _remove(file: Path, other: Path) -> None:
    file.unlink()


def _replace(file: Path, other: Path) -> None:
    shutil.copyfile(other, file)


DAMAGES: dict[str, Callable[[Path, Path], Any]] = {
    "truncated": _truncate,
    "one bit flipped": _flip,
    "missing": _remove,
    "replaced by another's": _replace,
}


@pytest.fixture(scope="module")
def saved(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 1 and 2, of two stages."""
    folder = tmp_path_factory.mktemp("saved")
    words = [*SETTINGS, *LAYOUT, "--save-interval", "1", "--exit-interval", "2", "--save", folder]
    programs.pretrain(2, *words).ok()
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(saved, tmp_path / "ck")


@pytest.fixture
def choose(run_ranks: Callable[..., list], programs: Programs) -> Callable[..., tuple[str, tuple[str, ...]]]:
    """The tag that two ranks choose in a folder, and the problems of newer ones."""

    def chosen(folder: Path, *words: str) -> tuple[str, tuple[str, ...]]:
        command = [*TINY_MODEL, *programs.data_arguments, *SETTINGS, *LAYOUT, "--load", str(folder), *words]
        first, second = run_ranks(2, choose_on_a_rank, command)
        assert first == second
        return first

    return chosen


def choose_on_a_rank(command: list[str]) -> tuple[str, tuple[str, ...]]:
    from megatron.checkpoint.load import select_checkpoint
    from megatron.cli import parse_run
    from megatron.common.errors import CheckpointError
    from megatron.training.preflight import check

    try:
        chosen = select_checkpoint(check(parse_run(command, os.environ))[0])
    except CheckpointError as error:
        return "", tuple(error.messages)
    return chosen.tag, chosen.newer_problems


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        *((kind, "one bit flipped") for kind in FILES),
        *((kind, damage) for kind in ("weights of a layer", "manifest") for damage in DAMAGES if "bit" not in damage),
    ],
)
def test_a_damaged_file_is_detected(folder: Path, choose: Callable, kind: str, damage: str) -> None:
    tag = folder / "global_step2"
    name, other = FILES[kind]
    assert choose(folder) == ("global_step2", ())
    DAMAGES[damage](tag / name, tag / other)
    chosen, (problem,) = choose(folder)
    assert chosen == "global_step1"
    if (kind, damage) == ("manifest", "missing"):
        reason = "the save was interrupted, or another program wrote the files"
        assert problem == f"{tag} has no manifest.json, which is written last: {reason}"
    elif (kind, damage) == ("manifest", "replaced by another's"):
        assert problem.startswith(f"{tag}/") and "saved" in problem  # any file of the checkpoint may be named
    else:
        assert problem.startswith(f"{tag}/{name} ")
    assert choose(folder, "--load-strict")[0] == ""


@pytest.mark.parametrize(
    ("kind", "legacy"),
    [*((kind, False) for kind in FILES if FILES[kind][0].endswith(".pt")), ("random streams", True)],
)
def test_a_file_that_would_run_code_is_refused(
    folder: Path, choose: Callable, tmp_path: Path, kind: str, legacy: bool
) -> None:
    """The manifest has been rewritten to match."""
    tag, marker = folder / "global_step2", tmp_path / "marker"
    file = tag / FILES[kind][0]
    content = torch.load(file, weights_only=False)  # not mapped, since the file is written again
    content["attack"] = Attack(marker)
    torch.save(content, file, _use_new_zipfile_serialization=not legacy)
    (tag / "manifest.json").unlink()
    write_manifest(tag, {})
    chosen, (problem,) = choose(folder)
    assert chosen == "global_step1"
    with pytest.raises(CheckpointError) as refusal:
        read_file(file)
    if legacy:
        assert problem.startswith(f"{file} cannot be read (")
    else:
        expected = f"{file} asks for posix.mkdir, which could run code; it is not loaded"
        assert problem == str(refusal.value) == expected
    assert not marker.exists()
    torch.load(file, weights_only=False)
    assert marker.exists(), "the attack is a real one"


def test_a_program_refuses_or_falls_back_on_all_ranks(programs: Programs, folder: Path, tmp_path: Path) -> None:
    """The rank that detects the damaged file is not the one that needs it."""
    tag, marker = folder / "global_step2", tmp_path / "marker"
    file = tag / FILES["optimizer"][0]
    torch.save({"optimizer_state_dict": Attack(marker)}, file)
    (tag / "manifest.json").unlink()
    write_manifest(tag, {})
    words = [*SETTINGS, *LAYOUT, "--load", folder]
    refused = programs.pretrain(2, *words, "--load-strict")
    lines = [line for line in refused.output.splitlines() if line.startswith("pretrain_gpt2.py: ")]
    assert lines == [
        f"pretrain_gpt2.py: error: {file} asks for posix.mkdir, which could run code; it is not loaded; "
        "the newest complete checkpoint is global_step1: to use it, remove --load-strict"
    ]
    assert refused.returncode == 4 and "Traceback" not in refused.output
    resumed = programs.pretrain(2, *words).ok()
    assert f"> warning: {file} asks for posix.mkdir" in resumed.output
    assert f"> loaded {folder}/global_step1; resuming after iteration 1" in resumed.output
    assert not marker.exists()


WEIGHT = torch.eye(4)
UNUSUAL: dict[str, tuple[Callable[[], Any], str]] = {
    "quantized": (lambda: torch.quantize_per_tensor(WEIGHT, 0.1, 0, torch.qint8), "a quantized tensor"),
    "sparse": (WEIGHT.to_sparse, "a sparse_coo tensor, not a dense one"),
    "compressed": (WEIGHT.to_sparse_csr, "a sparse_csr tensor, not a dense one"),
    "nested": (lambda: torch.nested.nested_tensor([WEIGHT, WEIGHT[:2]]), "a nested tensor, not a dense one"),
    "repeated": (lambda: torch.ones(1).expand(1 << 40), "a tensor of 4,398,046,511,104 bytes with 4 bytes of data"),
    "storage": (WEIGHT.untyped_storage, "a storage, not a tensor"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("read", [read_file, _read], ids=["ours", "Megatron's"])
def test_an_unusual_tensor_is_refused_without_a_warning(tmp_path: Path, kind: str, read: Callable) -> None:
    make, problem = UNUSUAL[kind]
    torch.save({"module": {"weight": make()}}, file := tmp_path / "mp_rank_00_model_states.pt")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with pytest.raises(CheckpointError) as caught:
            read(file)
    assert not shown and caught.value.messages[0].startswith(f"{file} cannot be read (weight is {problem}")


def test_enumerations_are_read_as_any_python_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.0 to 3.11.3 write a member as a call of getattr, which could be any other call, too."""
    from torch.distributed.checkpoint.planner import WriteItemType

    for kind in (ZeroStageEnum, WriteItemType):
        monkeypatch.setattr(kind, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    write_file(tmp_path / "ours.pt", {"stage": ZeroStageEnum.weights})
    assert read_file(tmp_path / "ours.pt") == {"stage": ZeroStageEnum.weights}
    torch.save({"kind": WriteItemType.SHARD, "args": 1}, tmp_path / "theirs.pt")
    with pytest.raises(CheckpointError, match="which could run code"):
        read_file(tmp_path / "theirs.pt")
    assert _Unpickler(io.BytesIO(pickle.dumps(WriteItemType.SHARD))).load() is WriteItemType.SHARD
    hostile = b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__new__'\ntR."
    with pytest.raises(pickle.UnpicklingError, match="which could run code"):
        _Unpickler(io.BytesIO(hostile)).load()


def _zipped_again(
    file: Path, order: Callable[[list[str]], list[str]], changes: dict[str, bytes], kind: int = 0
) -> None:
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in order(archive.namelist())}
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, content in records.items():
            archive.writestr(name, changes.get(name.partition("/")[2], content))


def _in_order(names: list[str]) -> list[str]:
    return names


OTHER_ARCHIVES: dict[str, tuple[Callable[[list[str]], list[str]], dict[str, bytes], int, str | None]] = {
    "another alignment": (_in_order, {}, zipfile.ZIP_STORED, None),
    "another order": (lambda names: names[::-1], {}, zipfile.ZIP_STORED, None),
    "a short record": (_in_order, {"data/1": bytes(60)}, zipfile.ZIP_STORED, "data/1 has 60 bytes, and its tensors"),
    "a long record": (_in_order, {"data/1": bytes(68)}, zipfile.ZIP_STORED, "data/1 has 68 bytes, and its tensors"),
    "compressed": (_in_order, {}, zipfile.ZIP_DEFLATED, "compressed, and files of torch are not"),
}


@pytest.mark.parametrize("case", OTHER_ARCHIVES)
def test_tensors_are_read_from_where_the_archive_has_them(tmp_path: Path, case: str) -> None:
    """Another program may have written the archive of a ``torch.save`` file."""
    order, changes, kind, problem = OTHER_ARCHIVES[case]
    tensors = {name: torch.randn(4, 4, generator=torch.Generator().manual_seed(at)) for at, name in enumerate("abc")}
    torch.save(tensors, file := tmp_path / "file.pt")
    _zipped_again(file, order, changes, kind)
    if problem:
        with pytest.raises(CheckpointError, match=problem):
            read_file(file)
        return
    for name, tensor in tensors.items():
        assert torch.equal(StoredFile(file).entry(name).read_all(), tensor)
        assert torch.equal(read_file(file)[name], tensor)


def _fail(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    "read", [read_file, lambda file: read_text(file), lambda file: check_content(file, Record(file.stat().st_size))]
)
def test_a_limit_of_the_host_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable) -> None:
    torch.save({"a": torch.ones(2)}, file := tmp_path / "a.pt")
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(torch, "load", lambda *_, **__: _fail(error))
    for name in ("read_bytes", "xxh128_of", "sha256_of"):
        monkeypatch.setattr(manifest, name, lambda *_, **__: _fail(error))
    with pytest.raises(ResourceError, match="a.pt cannot be read .*: raise ulimit -n"):
        read(file)


@pytest.mark.parametrize(
    "error", [torch.distributed.DistBackendError("lost"), torch.OutOfMemoryError("out of memory"), MemoryError()]
)
def test_a_failure_while_loading_is_no_other_form(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)), form_errors(tmp_path):
        raise error
