"""tools/convert_checkpoint.py merge, to-hf and from-hf, checked with Hugging Face's own libraries."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_lines import parse
from support.programs import Programs
from support.refusals import ROOT, refusal
from support.universal_folders import read_state
from support.whole_models import TOKENS, logits_and_weights, write_gpt2
from torch import Tensor

from megatron.checkpoint.files import record_of
from megatron.checkpoint.folder_lock import FolderLock
from megatron.checkpoint.manifest import MANIFEST, write_manifest
from megatron.checkpoint.run_file import RUN_FILE, describe
from megatron.checkpoint.tracker import LATEST, newest
from megatron.common.errors import CheckpointError
from megatron.tools.convert.inspection import find, read_description
from megatron.tools.convert.universal import cached_universal

os.environ["HF_HUB_OFFLINE"] = "1"
TOOL = "tools/convert_checkpoint.py"


def huggingface_model(folder: Path):
    """The model of a folder, as its users load it."""
    from transformers import GPT2LMHeadModel

    model, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


@torch.no_grad()
def huggingface_logits(folder: Path) -> Tensor:
    return huggingface_model(folder)(TOKENS).logits


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that Hugging Face wrote, without a tokenizer; every weight is drawn at random."""
    sizes = {"vocab_size": 92, "n_positions": 32, "n_layer": 4, "eos_token_id": 91, "bos_token_id": 91}
    return write_gpt2(tmp_path_factory.mktemp("foreign"), 0.2, **sizes)


def test_exported_shards_have_the_same_logits_in_transformers(trained: Path, exported: Path, run_ranks):
    ((ours, _),) = run_ranks(1, logits_and_weights, trained)
    theirs = huggingface_logits(exported)
    assert theirs.shape == (2, 8, 92) and theirs.std() > 0.01
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)


def test_from_hugging_face_and_back(programs: Programs, foreign: Path, tmp_path: Path, run_ranks):
    ours, again = tmp_path / "ours", tmp_path / "again"
    programs.warm(1, TOOL, "from-hf", foreign, "--output", ours).ok()
    programs.warm(1, TOOL, "to-hf", ours, "--output", again).ok()
    first, second = (load_file(folder / "model.safetensors") for folder in (foreign, again))
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)
    ((logits, _),) = run_ranks(1, logits_and_weights, ours)
    torch.testing.assert_close(logits, huggingface_logits(foreign), atol=1e-4, rtol=0)
    code, (line,) = refusal(tmp_path, "reshard ours --model-parallel-size 2", {"RANK": "0"}, program=TOOL, command=())
    assert code == 4 and line.endswith("give --load ours --finetune to a run on any layout")


def test_tokenizer_is_converted(programs: Programs, tmp_path: Path):
    """From tokenizer.json to GPT-2's two files; the padding rows of the table are removed."""
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

    from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
    from megatron.tools.preprocess.tokenizer_training import train_gpt2_bpe

    text = "The sea, the sea! 3 ships sailed in; we'd seen\n\n them before — naïvely."
    vocabulary, merges = train_gpt2_bpe([text] * 3, 300, 2)
    merges_text = "\n".join(["#version: 0.2", *map(" ".join, merges)]) + "\n"
    source = tmp_path / "source"
    source.mkdir()
    (source / "vocab.json").write_text(json.dumps(vocabulary))
    (source / "merges.txt").write_text(merges_text)
    size = len(vocabulary)
    GPT2Tokenizer.from_pretrained(source).save_pretrained(source)
    (source / "vocab.json").unlink(missing_ok=True)
    (source / "merges.txt").unlink(missing_ok=True)
    assert (source / "tokenizer.json").exists()
    GPT2LMHeadModel(GPT2Config(vocab_size=size + 5, n_positions=16, n_embd=8, n_layer=1, n_head=2)).save_pretrained(
        source
    )

    programs.warm(1, TOOL, "from-hf", source, "--output", tmp_path / "ours").ok()
    ours = GPT2BPETokenizer(str(tmp_path / "ours" / "vocab.json"), str(tmp_path / "ours" / "merges.txt"))
    assert (ours.vocab_size, ours.eod) == (size, vocabulary["<|endoftext|>"])
    programs.warm(1, TOOL, "to-hf", tmp_path / "ours", "--output", tmp_path / "hf").ok()
    theirs = GPT2Tokenizer.from_pretrained(tmp_path / "hf")
    assert len(theirs) == size and theirs.eos_token_id == ours.eod
    assert theirs(text)["input_ids"] == ours.tokenize(text) and len(ours.tokenize(text)) < len(text)
    assert huggingface_model(tmp_path / "hf").config.vocab_size == size


def test_merged_weights_are_those_of_the_layout(
    programs: Programs, trained: Path, merged: Path, exported: Path, tmp_path: Path, run_ranks
):
    ((_, expected),) = run_ranks(1, logits_and_weights, trained)
    programs.warm(
        1, TOOL, "merge", trained / "global_step3", "--output", tmp_path / "many", "--max-shard-size", "30kB"
    ).ok()
    one = load_file(merged)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values()) and len(files) > 2
    shards = {file.name: load_file(file) for file in files}
    assert all(sum(tensor.nbytes for tensor in shard.values()) <= 30_000 for shard in shards.values())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert one.keys() == expected.keys() == index["weight_map"].keys()
    for name, tensor in expected.items():
        assert tensor.equal(one[name]) and tensor.equal(shards[index["weight_map"][name]][name]), name
    programs.warm(1, TOOL, "to-hf", tmp_path / "many", "--output", tmp_path / "hf").ok()
    save_file(shards[files[1].name], files[1], metadata={"run": "{}"})
    with pytest.raises(CheckpointError, match=f"{files[1]} is of another run"):
        read_description(find(tmp_path / "many"))
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        ("merge nowhere --output {out}", "nowhere: no such file or folder", 4),
        ("reshard . --model-parallel-size 2", "is not a checkpoint", 4),
        ("to-universal .", "no checkpoint there", 4),
        ("merge {trained} --output {trained}", "exists already; name another place", 2),
        ("merge {trained} --output {out} --max-shard-size much", "--max-shard-size much is not a size", 2),
        ("merge {trained} --output {out}.safetensors --max-shard-size 1GB", "is one file", 2),
        ("merge {trained} --output {out}.safetensors/", "out.safetensors/ is a folder; name a file", 2),
        ("merge {foreign} --output {out}", "is a Hugging Face folder (with config.json), and merge accepts one che", 2),
        (
            "from-hf {trained} --output {out}",
            "is a folder of checkpoints, and from-hf accepts a Hugging Face folder (with config.json)",
            2,
        ),
        ("merge {trained} --output {link}", "link is a link, which would be replaced; name a folder in /", 2),
        ("merge {trained} --output /proc", "/proc is where a file system is mounted; name a folder in it", 2),
        ("merge {trained} --output {trained}/global_step3/m.safetensors", "is a checkpoint, and is refused with", 2),
        ("reshard {trained} --output {out} --time-limit 1e300", "--time-limit", 2),
    ],
)
def test_a_mistake_is_one_line_before_torch(
    trained: Path, foreign: Path, tmp_path: Path, words: str, message: str, code: int
):
    (empty := tmp_path / "empty").mkdir()
    (link := tmp_path / "link").symlink_to(empty)
    words = words.format(trained=trained, foreign=foreign, link=link, out=tmp_path / "out")
    found, (line,) = refusal(tmp_path, words, program=TOOL, command=())
    assert found == code and message in line


@pytest.mark.parametrize("command", ["merge {trained}", "from-hf {exported}"])
def test_a_limit_of_file_sizes_is_named(trained: Path, exported: Path, tmp_path: Path, command: str):
    command = command.format(trained=trained, exported=exported)
    words = f"ulimit -f 8; {sys.executable} -B {ROOT / TOOL} {command} --output {tmp_path}/m.safetensors"
    ended = subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=240)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 7 and "m.safetensors" in line and "ulimit -f" in line and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        ("reshard --time-limit 0.01", "not finished after 0.01 s: give more with --time-limit", 6),
        ("to-peft", "global_step3 has no adapters: it was trained without --lora-rank", 2),
        ("merge-lora", "global_step3 has no adapters: it was trained without --lora-rank", 2),
    ],
)
def test_a_mistake_that_takes_longer(
    programs: Programs, trained: Path, tmp_path: Path, words: str, message: str, code: int
):
    command, *flags = words.split()
    finished = programs.warm(1, TOOL, command, trained / "global_step3", "--output", tmp_path / "out", *flags)
    assert finished.returncode == code and message in finished.output.splitlines()[-1]
    assert not any(tmp_path.iterdir())


def test_changed_weights_are_refused(programs: Programs, copy: Path, tmp_path: Path):
    file = copy / "global_step3" / "layer_03-model_01-model_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    finished = programs.warm(1, TOOL, "merge", copy, "--output", tmp_path / "one.safetensors")
    assert finished.returncode == 4 and finished.output.count("\n") == 1 and str(file) in finished.output
    finished = programs.warm(1, TOOL, "reshard", copy / "global_step3", "--output", tmp_path / "one")
    assert finished.returncode == 4 and str(file) in finished.output
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_reshard_keeps_every_bit(programs: Programs, copy: Path, tmp_path: Path):
    """Weights and optimizer, from TP 2 x PP 2 to PP 2 x DP 2 at another ZeRO stage, with the position in the data."""
    output = tmp_path / "resharded"
    flags = ["--pipe-parallel-size", "2", "--data-parallel-size", "2", "--zero-stage", "0"]
    words = (TOOL, "reshard", copy / "global_step3", "--output", output, *flags)
    programs.warm(4, *words, MEGATRON_RESHARDS="1").ok()
    before, after = newest(copy), newest(output)
    assert (after.layout.model_parallel_size, after.layout.zero_stage) == (1, 0)
    assert after.history == before.history and after.description["settings"] == before.description["settings"]
    (old, _), (new, _) = cached_universal(before), cached_universal(after)
    names = {path.name for path in (old / "zero").iterdir() if path.is_dir()}
    assert names == {path.name for path in (new / "zero").iterdir() if path.is_dir()} and len(names) == 52
    for name in names:
        one, other = read_state(old, name), read_state(new, name)
        assert {"exp_avg", "exp_avg_sq"} < one.keys() == other.keys()
        for key, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), (name, key)
    wrong = programs.warm(1, TOOL, "reshard", copy, "--model-parallel-size", "3")
    assert wrong.returncode == 2 and "--num-attention-heads 4 is not a multiple" in wrong.output


def test_ranks_of_a_killed_reshard_end(trained: Path, tmp_path: Path):
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "TMPDIR": str(tmp_path)}
    command = [sys.executable, ROOT / TOOL, "reshard", trained / "global_step3", "--output", tmp_path / "out"]
    tool = psutil.Popen([*map(str, command), "--model-parallel-size", "2"], env=environ)

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    wait_for(lambda: len(tool.children(recursive=True)) > 2)  # two helpers of multiprocessing, and a rank
    children = tool.children(recursive=True)
    tool.kill()
    tool.wait()
    wait_for(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a checkpoint, as far as it is read before its weights."""
    tag = tmp_path / "ck" / "global_step6"
    tag.mkdir(parents=True)
    (tag / RUN_FILE).write_text(json.dumps(describe(parse(), 6)))
    write_manifest(tag, {RUN_FILE: record_of(tag / RUN_FILE)})
    (tag.parent / LATEST).write_text(tag.name)
    return tag.parent


@pytest.mark.parametrize("words", ["to-universal {}", "merge {} --output {}/model.safetensors"])
def test_a_folder_in_use_is_refused(words: str, folder: Path, programs: Programs) -> None:
    before = sorted(folder.rglob("*"))
    lock = FolderLock(folder)
    lock.take()
    try:
        command = [word.format(folder) for word in words.split()]
        finished = programs.warm(1, "tools/convert_checkpoint.py", *command)
    finally:
        lock.release()
    assert finished.returncode == 4 and "saves into this folder" in finished.output, finished
    assert len(finished.output.splitlines()) == 1
    assert sorted(folder.rglob("*")) == before and (folder / "global_step6" / MANIFEST).exists()
