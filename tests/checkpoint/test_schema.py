"""A checkpoint whose hashes are right and whose content is not that of the run is refused before anything is copied."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.conftest import SETTINGS
from support.layouts import layout
from support.programs import TINY_MODEL, Programs
from support.training import started_engine

from megatron.checkpoint.checks import form_errors
from megatron.checkpoint.commit import write_description
from megatron.checkpoint.manifest import write_manifest
from megatron.checkpoint.schema import Updates, check_counts, check_state
from megatron.checkpoint.tracker import newest, tag_at
from megatron.common.errors import CheckpointError
from megatron.tools.convert.load_and_save import lazy_weights
from megatron.tools.convert.universal import cached_universal

Change = Callable[[Any], Any]
RANK, ZERO = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
RNG = "rng_state_00000.pt"
RANK_AT_ZERO3, RANK_1_AT_ZERO3 = (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2))
LAYER, LAYER_1 = "layer_03-model_00-model_states.pt", "layer_03-model_01-model_states.pt"
RANK_1, ZERO_1 = "mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt"


def sealed(folder: Path, name: str, change: Change | str | None) -> Path:
    """The file ``name`` with its content changed, exchanged with another file, or without it; with hashes that fit."""
    file = folder / "global_step3" / name
    if change is None:
        file.unlink()
    elif isinstance(change, str):
        exchanged = file.with_name(change)
        file.rename(folder / "aside")
        exchanged.rename(file)
        (folder / "aside").rename(exchanged)
    else:
        content = torch.load(file, weights_only=False)
        torch.save(change(content) or content, file)
    (file.parent / "manifest.json").unlink()
    write_manifest(file.parent, {})
    return file


def put(key: str, value: Callable[[Any], Any] | None) -> Change:
    """Replace what is at a path of keys, such as ``state/0/step``, or remove it."""

    def change(content: Any) -> None:
        *path, last = (int(part) if part.isdecimal() else part for part in key.split("/"))
        for part in path:
            content = content[part]
        if value is None:
            del content[last]
        else:
            content[last] = value(content[last])

    return change


def with_element(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = number
        return tensor

    return change


def scale_nan(scaler: Any) -> Any:
    scaler.cur_scale = math.nan
    return scaler


def exchanged(shapes: Any) -> Any:
    """The names of two parameters of one shape exchanged."""
    names = {
        "2.attention.dense.weight": "3.attention.dense.weight",
        "3.attention.dense.weight": "2.attention.dense.weight",
    }
    return [{names.get(name, name): shape for name, shape in group.items()} for group in shapes]


def scale_1024(scaler: Any) -> Any:
    scaler.cur_scale = 1024.0
    return scaler


def other_moments(names: set[str], others: set[str]) -> Change:
    """The first state of the optimizer that has ``names`` has ``others`` in place of them."""

    def change(content: Any) -> None:
        state = next(state for state in content["optimizer"]["state"].values() if state.keys() >= names)
        moment = [state.pop(name) for name in names][0]
        state |= {name: moment.abs() for name in others} | {"step": torch.tensor(3.0)}

    return change


STATE = "optimizer/state/0"
BASE = "optimizer_state_dict/base_optimizer_state"
DENSE = "module/3.attention.dense.weight"
VERSION = "optimizer_state_dict/ds_version"
PADDINGS = "optimizer_state_dict/param_alignment_paddings"
MASTERS = "optimizer_state_dict/single_partition_of_fp32_groups"
MUON, ADAM = {"momentum_buffer"}, {"exp_avg", "exp_avg_sq"}
CASES: dict[str, list[tuple[str, Change | str | None, str]]] = {
    "dp1 --optimizer muon": [
        (RANK, other_moments(MUON, ADAM), "exp_avg, exp_avg_sq, step, and should be momentum_buffer"),
        (RANK, other_moments(ADAM, MUON), "momentum_buffer, step, and should be exp_avg, exp_avg_sq"),
    ],
    "dp1": [
        (RANK, put(f"{STATE}/exp_avg", lambda t: t.flatten()[:5].clone()), r"state\[0\].exp_avg is float32 \[5\]"),
        (RANK, put(f"{STATE}/exp_avg_sq", with_element(-1)), r"state\[0\].exp_avg_sq is from -1 on"),
        (RANK, put(f"{STATE}/exp_avg", with_element(math.nan)), r"state\[0\].exp_avg is from nan to nan"),
        (RANK, put(f"{STATE}/exp_avg", lambda t: t.half()), r"state\[0\].exp_avg is float16"),
        (RANK, put(f"{STATE}/exp_avg", lambda t: t.t().contiguous().t()), r"state\[0\].exp_avg is of strides \[1, "),
        (RANK, put(f"{STATE}/exp_avg", None), r"the state of state\[0\] is exp_avg_sq, step"),
        (RANK, put(STATE, None), r"the state of state\[0\] is empty"),
        *(
            (RANK, put(f"{STATE}/step", lambda _, step=step: torch.tensor(step)), r"state\[0\].step is ")
            for step in (1e30, -5.0, 2.5)
        ),
        (RANK, put(f"{STATE}/step", lambda _: True), r"state\[0\].step is True"),
        (RANK, put(f"{STATE}/step", lambda _: torch.tensor(True)), r"state\[0\].step is True"),
        (RANK, put(f"{STATE}/step", lambda _: torch.tensor(1.0)), r"step counts are \[1, 3\]"),
        (RANK, put(f"{STATE}/exp_avg", lambda t: torch._neg_view(-t)), "exp_avg is a lazily negated tensor"),
        (RANK, put("module/3.attention.dense.weight", lambda t: t.to(torch.float8_e4m3fn)), "weight is float8_e4m3fn"),
        (RANK, put("optimizer/param_groups", lambda g: g[::-1]), "numbers of the parameters in the groups"),
        (RANK, put("module/3.attention.dense.weight", lambda t: t.int()), "dense.weight is int32"),
        (RANK, put("module/3.attention.dense.weight", with_element(math.inf)), "dense.weight is from .* to inf"),
        (RANK, put("module/3.attention.dense.weight", lambda t: t[:1]), r"dense.weight is float32 \[1, 32\]"),
        (RANK, put("module/3.attention.dense.weight", None), "dense.weight is missing"),
        (RANK, put("module", lambda m: m | {"more": torch.ones(1)}), "more is there"),
        (RANK, put("global_steps", lambda _: 10**9), "global_steps is 1000000000"),
        (RANK, put("mp_world_size", lambda _: 0), "mp_world_size is 0, and should be 1"),
        (RANK, put("global_steps", lambda _: 2), "global_steps is 2, and should be 3"),
        (RANK, put("skipped_steps", lambda _: 1), "lr_scheduler.num_iters is 3, and should be 2"),
        *(
            (
                RANK,
                put("lr_scheduler/num_iters", lambda _, count=count: count),
                f"num_iters is {count}, and should be 3",
            )
            for count in (10**9, 1, 3.0)
        ),
        (
            RANK,
            put("lr_scheduler", lambda _: None),
            "lr_scheduler is of type NoneType, and should be a part that holds",
        ),
        (
            RANK,
            put("lr_scheduler/start_lr", lambda _: math.nan),
            "lr_scheduler.start_lr is nan, and should be 0.* as in run.json",
        ),
        (RANK, put("lr_scheduler/warmup_iter", lambda _: 3), "lr_scheduler.warmup_iter is 3, and should be "),
        (RANK, put("optimizer/state", lambda s: s | {99: s[0]}), r"state\[99\] is there"),
        (RANK, put("checkpoint_version", lambda _: 0.0), "checkpoint_version is 0.0, and should be 3.0"),
        (RNG, put("random_rng_state", lambda s: (3, (-1,) * 624 + (5,), None)), "random_rng_state is no state of"),
        (RANK, put("module/3.attention.dense.weight", lambda t: t.to_sparse()), "dense.weight is a sparse_coo tensor"),
        (RANK, put("module/3.attention.dense.weight", lambda t: t.to("meta")), "dense.weight is without data"),
        (RANK, put(f"{STATE}/exp_avg", lambda t: t.to("meta")), "exp_avg is without data"),
        (RANK, put("global_samples", str), "global_samples is '96'"),
        (RANK, put("optimizer", None), "lacks optimizer$"),
        (RANK, put("lr_scheduler", None), "lacks lr_scheduler$"),
        (RANK, lambda content: [content], "lacks a part"),
        (RANK, put("global_samples", lambda _: -1), "global_samples is -1, and should be a number of samples"),
        (RANK, put("global_samples", lambda _: 1 << 90), "global_samples is 1237940039285380274899124224"),
        (RNG, None, "is missing: "),
        (RNG, put("cuda_rng_state", None), "lacks cuda_rng_state$"),
        (RNG, lambda content: [content], "lacks cuda_rng_state$"),
        (RNG, put("cuda_rng_state", str), "cuda_rng_state is no state of"),
        (RNG, put("np_rng_state", lambda s: (*s[:2], -7, *s[3:])), "np_rng_state is no state of"),
        (RNG, put("rng_tracker_states/model-parallel-rng", torch.zeros_like), "rng_tracker_states is no state of"),
        (RNG, put("torch_rng_state", lambda t: t[:8].clone()), "torch_rng_state is no state of"),
    ],
    "tp2 pp2 zero1": [
        (LAYER, "layer_04-model_00-model_states.pt", "files have been exchanged"),
        (LAYER, "layer_03-model_01-model_states.pt", "files have been exchanged"),
        (ZERO, "zero_pp_rank_0_mp_rank_01_optim_states.pt", "files have been exchanged"),
        (RANK, "mp_rank_01_model_states.pt", "files have been exchanged"),
        (LAYER, put("attention.dense.weight", lambda t: t.int()), "attention.dense.weight is int32"),
        (LAYER_1, put("input_layernorm.weight", with_element(0.5)), "from what it is in"),
        (ZERO_1, put("optimizer_state_dict/single_partition_of_fp32_groups/1", with_element(9)), "from what it is in"),
        (ZERO_1, put(f"{BASE}/state/1/exp_avg", with_element(9)), "from what it is in"),
        (ZERO, put(f"{BASE}/state/0/exp_avg", lambda t: t[:-8].clone()), r"state\[0\].exp_avg is float32"),
        (ZERO, put(f"{BASE}/state/1/exp_avg_sq", with_element(-1)), r"state\[1\].exp_avg_sq is from -1 on"),
        (ZERO, put(f"{BASE}/state/1/step", lambda _: 1), r"step counts are \[1, 3\]"),
        (ZERO, put(f"{BASE}/state/1/exp_avg", lambda t: t.tolist()), "exp_avg is of type list"),
        *((ZERO_1, put(VERSION, lambda _, v=v: v), f"{ZERO_1} lacks a part.*Invalid v") for v in (5, None, "5\x1b")),
        (ZERO_1, put(VERSION, lambda _: "0.3.10"), "ds_version is 0.3.10, and should be 0.3.17 or later"),
        (ZERO_1, put("optimizer_state_dict/loss_scaler", scale_1024), r"loss scales are \[1.*, 1024.0\]"),
        (ZERO, put(f"{BASE}/param_groups", lambda _: []), "numbers of the parameters in the groups"),
        (
            ZERO,
            put("optimizer_state_dict/single_partition_of_fp32_groups/0", with_element(math.nan)),
            r"single_partition_of_fp32_groups\[0\] is from nan",
        ),
        (ZERO, put("optimizer_state_dict/single_partition_of_fp32_groups", lambda g: g[::-1]), "is float32"),
        (ZERO, None, "is missing: "),
        (LAYER, None, "is missing: "),
        (ZERO, put(f"{BASE}/state", lambda _: 5), "(lacks a part|is of type int)"),
        (ZERO, put("optimizer_state_dict/loss_scaler", lambda _: "1"), "loss.scaler is "),
        (ZERO, put(f"{PADDINGS}/0", lambda p: [8, -8, *p[2:]]), r"param_alignment_paddings.* is .*\[8, -8, "),
        (ZERO, put(f"{PADDINGS}/0", lambda p: ["8", *p[1:]]), r"param_alignment_paddings.* is .*\['8', "),
        (ZERO, put(PADDINGS, lambda p: "8"), r"param_alignment_paddings.* is "),
        (ZERO, put("optimizer_state_dict", lambda _: None), "optimizer.* is of type NoneType, and should be a "),
        (RANK_1, put("ds_version", lambda _: 5), f"{RANK_1}: ds_version is 5, and should be .* as in {RANK}"),
        (RANK_1, put("tokens", lambda _: 5), f"{RANK_1}: tokens is 5, and should be .* as in {RANK}"),
    ],
    "dp1 zero2 bf16": [
        (f"bf16_{ZERO}", put(f"{MASTERS}/0", with_element(3.4e38)), r"groups\[0\] is .* finite in bfloat16"),
        (f"bf16_{ZERO}", put(f"{BASE}/state", lambda s: s | {9: s[0]}), r"state\[9\] is there"),
    ],
    "dp2 zero3": [
        (
            "zero_pp_rank_1_mp_rank_00_optim_states.pt",
            put("optimizer_state_dict/fp32_flat_groups/0", lambda t: t[:-8].clone()),
            r"fp32_flat_groups\[0\] is float32",
        ),
        (ZERO, put("optimizer_state_dict/optimizer_state_dict/state/0/exp_avg_sq", with_element(-1)), "from -1 on"),
        (ZERO, put("optimizer_state_dict/loss_scaler", scale_nan), "the loss scale is nan"),
        (RANK_1_AT_ZERO3, put("dp_world_size", lambda _: 5), "dp_world_size is 5, and should be 2"),
    ],
}


@pytest.mark.parametrize("saver", CASES)
def test_content_that_does_not_fit_is_refused(
    saved_on, run_ranks_once, programs: Programs, tmp_path: Path, saver: str
) -> None:
    """On the layout that saved it, where DeepSpeed loads it, and on all ranks. An undamaged one still is loaded."""
    processes, flags = layout(saver)
    folders, files, texts = [], [], []
    for number, (name, change, text) in enumerate(CASES[saver]):
        others = shutil.ignore_patterns("global_step6", "global_step7")  # which would be loaded instead
        folders.append(shutil.copytree(saved_on(saver), tmp_path / str(number), ignore=others))
        files.append(sealed(folders[-1], name, change))
        texts.append(text)
    folders.append(saved_on(saver))
    words = [*TINY_MODEL, *programs.data_arguments, *SETTINGS, *flags.split()]
    ranks = run_ranks_once(processes, messages_of_loading, words, [str(folder) for folder in folders])
    for found in ranks:
        assert found[-1] == "loaded 3"
    for case in zip(files, texts, *ranks, strict=False):
        file, text, *messages = case
        assert len(set(messages)) == 1, messages
        assert str(file) in messages[0] or text in messages[0] or "should be equal" in messages[0]
        assert re.search(text, messages[0]), (text, messages[0])


def messages_of_loading(words: list[str], folders: list[str], unchanged: bool = True) -> list[str]:
    """What loading each of these folders says, into the same engine, whose weights an error leaves ``unchanged``."""
    from megatron.checkpoint.load import load_checkpoint, select_checkpoint
    from megatron.cli import parse_run
    from megatron.training.preflight import check

    said: list[str] = []
    with started_engine(words) as (layout, engine):
        for folder in folders:
            to_load = check(parse_run([*words, "--load", folder], os.environ))[0]
            weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
            try:
                saved = select_checkpoint(to_load)
                said.append(f"loaded {load_checkpoint(engine, to_load, layout, saved).iteration}")
            except CheckpointError as error:
                said.append(str(error))
                if unchanged and "rng_state" not in str(error):
                    assert all(map(torch.equal, weights, engine.module.parameters())), error
    return said


def test_clipping_and_a_static_scale_are_those_of_the_command_line(
    saved_on, run_ranks_once, programs: Programs, tmp_path: Path
) -> None:
    """DeepSpeed takes those of the checkpoint."""
    processes, flags = layout("tp2 pp2 zero1")
    folder = shutil.copytree(saved_on("tp2 pp2 zero1"), tmp_path / "saved")
    for rank in range(4):
        name = f"zero_pp_rank_0_mp_rank_0{rank}_optim_states.pt"
        sealed(folder, name, put("optimizer_state_dict/loss_scaler", scale_1024))
    words = [*TINY_MODEL, *programs.data_arguments, *SETTINGS, *flags.split(), "--override", "--clip-grad", "0.5"]
    assert set(run_ranks_once(processes, settings_after_loading, words, str(folder))) == {(0.5, 1)}


def settings_after_loading(words: list[str], folder: str) -> tuple[float, float]:
    from megatron.checkpoint.load import load_checkpoint, select_checkpoint
    from megatron.cli import parse_run
    from megatron.training.preflight import check

    with started_engine(words) as (layout, engine):
        to_load = check(parse_run([*words, "--load", folder], os.environ))[0]
        load_checkpoint(engine, to_load, layout, select_checkpoint(to_load))
        return engine.optimizer.clip_grad, engine.optimizer.loss_scale


PARTITION_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
RESHARDED: list[tuple[str, str, Change, str]] = [
    ("tp2 pp2 zero1", ZERO, put(MASTERS, lambda _: {}), r"lacks single_partition_of_fp32_groups\[0\]"),
    ("tp2 pp2 zero1", ZERO, put(f"{MASTERS}/0", lambda _: None), r"groups\[0\] is of type NoneType"),
    (
        "tp2 pp2 zero1",
        ZERO,
        put("optimizer_state_dict", lambda _: torch.ones(3)),
        r"is float32 \[3\], and should be a ",
    ),
    ("dp2 zero3", ZERO, put("optimizer_state_dict/fp32_flat_groups", lambda _: []), r"lacks fp32_flat_groups\[0\]"),
    ("tp2 pp2 zero1", ZERO_1, put(f"{BASE}/state/1/step", lambda _: 1), r"step counts are \[1, 3\]"),
    ("tp2 pp2 zero1", ZERO_1, put(f"{BASE}/state/1/step", lambda _: True), r"state\[1\].step is True"),
    (
        "dp2 zero3",
        PARTITION_1,
        put("optimizer_state_dict/optimizer_state_dict/state/0/step", lambda _: 1),
        r"step counts are \[1, 3\]",
    ),
    ("dp1", RANK, put(f"{STATE}/step", lambda _: torch.tensor(1.0)), r"step counts are \[1, 3\]"),
    ("dp1", RANK, put("module/3.attention.dense.weight", lambda t: t.int()), "dense.weight.* int32"),
    ("dp1", RANK, put("module/3.attention.dense.weight", lambda t: t.bool()), "dense.weight.* bool"),
    ("tp2 pp2 zero1", LAYER_1, put("input_layernorm.weight", lambda t: t.bool()), "layernorm.weight.* bool"),
    ("tp2 pp2 zero1", LAYER_1, put("attention.dense.weight", lambda t: t.int()), "dense.weight.* int32"),
    ("dp1", RANK, put("optimizer/param_groups", lambda g: g[::-1]), "numbers of the parameters in the groups"),
    ("tp2 pp2 zero1", RANK, put("lr_scheduler/num_iters", lambda _: 1), "num_iters is 1, and should be 3"),
    ("dp2 zero3", ZERO, put("optimizer_state_dict/loss_scaler", scale_nan), "the loss scale is nan"),
    ("dp2 zero3", RANK_AT_ZERO3, put("skipped_steps", lambda _: 1), "num_iters is 3, and should be 2"),
    ("tp2 pp2 zero1", RANK_1, put("lr_scheduler/start_lr", lambda _: 0.5), r"lr_scheduler is {.start_lr.: 0.5}, and"),
    ("tp2 pp2 zero1", RANK_1, put("skipped_steps", lambda _: 1), "skipped_steps is 1, and should be 0"),
    ("dp1", RANK, put("param_shapes", lambda _: 5), "lacks a part"),
    ("dp1", RANK, put("param_shapes", lambda _: [5]), "lacks a part"),
    ("dp1", RANK, put("optimizer", lambda _: 5), "(lacks a part|is of type int)"),
    ("dp1", RANK, lambda content: [content], "(it is of type list|lacks skipped_steps)"),
    ("dp1", RANK, put("param_shapes", exchanged), "is 3.attention.dense.weight, and should be 2.att"),
]
NUMBERS: list[tuple[str, str, Change, str]] = [
    ("tp2 pp2 zero1", ZERO_1, put(f"{MASTERS}/0", lambda t: t.double()), r"single.*\[0\] is of torch.float64"),
    (
        "tp2 pp2 zero1",
        ZERO,
        put(f"{MASTERS}/0", lambda t: t * math.nan),
        r"single_partition_of_fp32_groups\[0\] is from",
    ),
    (
        "tp2 pp2 zero1",
        ZERO_1,
        put(f"{BASE}/state/0/exp_avg", lambda t: t * math.nan),
        r"state\[0\].exp_avg is from nan",
    ),
    ("dp1", RANK, put(f"{STATE}/exp_avg_sq", lambda t: -1 - t), r"state\[0\].exp_avg_sq is from -1"),
    ("dp1", RANK, put(DENSE, lambda t: with_element(1e300)(t.double())), r".*weight is .* to 1e\+300, .* finite in "),
    ("dp1", RANK, put(DENSE, with_element(3.4e38)), r".*weight is from .* to 3.39.*, .* finite in bfloat16"),
]


def test_it_is_not_read_for_another_layout(saved_on, run_ranks_once, programs: Programs, tmp_path: Path) -> None:
    """Neither converted nor loaded."""
    files_with_states = [case for case in CASES["tp2 pp2 zero1"] if case[0] in (ZERO, ZERO_1)]
    # The loss scale is read from the first file, and the version is not.
    changes = [
        case
        for case in files_with_states
        if not isinstance(case[1], str) and not re.search("scales|Invalid|ds_version", case[2])
    ]
    spoilt = [*(("tp2 pp2 zero1", name, change, "") for name, change, _ in changes), *RESHARDED]
    folders, files = [], []
    for number, (saver, name, change, text) in enumerate(spoilt):
        others = shutil.ignore_patterns("global_step6", "global_step7", "global_step3_universal")
        folders.append(shutil.copytree(saved_on(saver), tmp_path / str(number), ignore=others))
        files.append(sealed(folders[-1], name, change))
        with pytest.raises(CheckpointError, match=f"{files[-1]}.*{text}"):
            cached_universal(newest(folders[-1]))
    words = [*TINY_MODEL, *programs.data_arguments, *SETTINGS, "--zero-stage", "3"]
    lacking = folders[-len(RESHARDED) :]
    other_type = shutil.copytree(saved_on("tp2 pp2 zero1"), tmp_path / "other type")
    for name in (f"zero_pp_rank_0_mp_rank_0{rank}_optim_states.pt" for rank in range(4)):
        sealed(other_type, name, put(f"{BASE}/state/0/exp_avg", lambda t: t.half()))
    loaded = [str(folder) for folder in (*lacking, other_type)]
    (*said, message), other = run_ranks_once(2, messages_of_loading, words, loaded)
    assert [*said, message] == other
    assert re.match(rf"{other_type}/global_step3/zero_pp_rank_0_mp_rank_0\d_optim_states.pt: ", message), message
    assert ".exp_avg is float16 [" in message, message
    for file, (*_, text), message in zip(files[-len(RESHARDED) :], RESHARDED, said, strict=True):
        assert re.match(f"{file}.*{text}", message), message


def test_numbers_are_checked_as_they_are_read(saved_on, run_ranks_once, programs: Programs, tmp_path: Path) -> None:
    """For another layout. All ranks say the same, with the file that has the number."""
    folders, files = [], []
    for number, (saver, name, change, text) in enumerate(NUMBERS):
        others = shutil.ignore_patterns("global_step6", "global_step7", "global_step3_universal")
        folders.append(shutil.copytree(saved_on(saver), tmp_path / str(number), ignore=others))
        files.append(sealed(folders[-1], name, change))
        if "bfloat16" not in text:
            with pytest.raises(CheckpointError, match=f"{files[-1]}: {text}"):
                cached_universal(newest(folders[-1]))
    words = [*TINY_MODEL, *programs.data_arguments, *SETTINGS, "--zero-stage", "3", "--bf16"]
    said, other = run_ranks_once(2, messages_of_loading, words, [str(folder) for folder in folders], False)
    assert said == other
    for file, (*_, text), message in zip(files, NUMBERS, said, strict=True):
        assert re.match(f"{file}: {text}", message), message


@pytest.mark.parametrize(
    ("saver", "name", "change", "text"),
    [
        ("dp1", RANK, put(f"{STATE}/exp_avg", lambda t: t.t().contiguous()), r"exp_avg is float32 \[\d+, \d+\]"),
        (
            "dp2 zero3",
            RANK_AT_ZERO3,
            put("param_shapes", exchanged),
            "is 3.attention.dense.weight, and should be 2.att",
        ),
    ],
)
def test_shapes_and_order_are_compared_for_another_layout(
    saved_on, tmp_path: Path, saver: str, name: str, change: Change, text: str
) -> None:
    folder = shutil.copytree(saved_on(saver), tmp_path / "saved")
    shutil.rmtree(folder / "global_step3_universal", ignore_errors=True)
    file = sealed(folder, name, change)
    with pytest.raises(CheckpointError, match=f"{file}: .*{text}"):
        cached_universal(newest(folder))


def test_copies_are_compared_by_readers_of_weights(saved_on, tmp_path: Path) -> None:
    """On tensor-parallel ranks; as if devices had rounded differently they may differ."""
    folder = shutil.copytree(saved_on("tp2 pp2 zero1"), tmp_path / "saved")
    sealed(folder, LAYER_1, put("input_layernorm.weight", lambda t: t * 1.0001))
    lazy_weights(newest(folder))
    file = sealed(folder, LAYER_1, put("attention.dense.weight", lambda t: t.half()))
    with pytest.raises(CheckpointError, match=f"{file}: attention.dense.weight is of torch.float16, .* in {LAYER}"):
        list(lazy_weights(newest(folder)).values())
    sealed(folder, LAYER_1, put("attention.dense.weight", lambda t: t.float()))
    file = sealed(folder, LAYER_1, put("input_layernorm.weight", lambda t: t * 1.01))
    with pytest.raises(CheckpointError, match=f"{file}: 3.input_layernorm.weight.* 0.0.* in {LAYER}"):
        lazy_weights(newest(folder))
    sealed(folder, LAYER_1, put("input_layernorm.weight", lambda t: t / 1.01))
    file = sealed(folder, LAYER, put("attention.dense.weight", with_element(math.nan)))
    with pytest.raises(CheckpointError, match=f"{file}: attention.dense.weight is from nan to nan"):
        list(lazy_weights(newest(folder)).values())
    sealed(folder, LAYER, "layer_04-model_00-model_states.pt")
    with pytest.raises(CheckpointError, match="files have been exchanged"):
        list(lazy_weights(newest(folder)).values())


@pytest.mark.parametrize("error", [FileNotFoundError, AssertionError, RuntimeError, KeyError, EOFError])
def test_a_checkpoint_that_is_removed_while_it_is_read(tmp_path: Path, error: type[Exception]) -> None:
    """What a reader, such as DeepSpeed, raises then. Of a checkpoint that is there only its form is doubted."""
    with pytest.raises(CheckpointError, match="is gone"), form_errors(tmp_path / "gone"):
        raise error
    is_form = error is not FileNotFoundError
    with pytest.raises(CheckpointError if is_form else error), form_errors(tmp_path):
        raise error


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put("buffer_names", lambda _: 5), " lacks a part, or holds one of another form"),
        (put("module", lambda m: m | {"more": torch.ones(1)}), " holds more, which the model does not have"),
        (
            put("module/3.attention.dense.weight", lambda _: None),
            r": 3.attention.dense.weight is of type NoneType, and should be float32 \[32, 32\]",
        ),
        (
            put("module/3.attention.dense.weight", lambda t: t[0].clone()),
            r": 3.attention.dense.weight is float32 \[32\], and should be float32 \[32, 32\]",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_refused_by_readers(
    saved_on, tmp_path: Path, change: Change, text: str
) -> None:
    folder = shutil.copytree(saved_on("dp1"), tmp_path / "saved", ignore=shutil.ignore_patterns("*_universal"))
    file = sealed(folder, RANK, change)
    for read in (lazy_weights, cached_universal):
        with pytest.raises(CheckpointError, match=f"{file}{text}"):
            read(newest(folder))


@pytest.mark.parametrize(
    ("name", "key", "change"),
    [
        ("layer_00-model_00-model_states.pt", "word_embeddings.weight", lambda t: t[:-1].clone()),
        (LAYER_1, "attention.query_key_value.weight", lambda t: torch.cat([t, t])),
        (LAYER_1, "attention.dense.weight", lambda t: t[:, 1:].clone()),
    ],
)
def test_shards_of_another_shape_are_refused_by_readers(saved_on, tmp_path: Path, name: str, key: str, change: Change):
    """Also of the vocabulary, whose last rows are padding."""
    folder = shutil.copytree(
        saved_on("tp2 pp2 zero1"), tmp_path / "saved", ignore=shutil.ignore_patterns("*_universal")
    )
    lazy_weights(newest(folder))
    file = sealed(folder, name, put(key, change))
    with pytest.raises(CheckpointError, match=rf"{file}: .*{key} is float32 \[\d+, \d+\], and should be "):
        lazy_weights(newest(folder))


TP_SIZE = "--model-parallel-size"
TP2_PP2, ZERO3 = "tp2 pp2 zero1", "dp2 zero3"
DESCRIPTIONS: list[tuple[str, str, Callable[[Any], Any], str]] = [
    ("dp1", "layout/precision", lambda _: "int8", "precision is 'int8': choose from fp32, bf16, fp16"),
    ("dp1", "layout/data-parallel size", lambda _: 2, "has 2 ranks with random states, but there are files of 1"),
    (TP2_PP2, "layout/data-parallel size", lambda _: 2, "has 2 partitions of the optimizer, but there are files of 1"),
    (TP2_PP2, "layout/--model-parallel-size", lambda _: 1, "has 1 tensor-parallel shards, but there are files of 2"),
    (TP2_PP2, "layout/--pipe-parallel-size", lambda _: 4, "has 8 model-parallel ranks, but there are files of 4"),
    (ZERO3, "layout/data-parallel size", lambda _: 1, "has 1 partitions of the optimizer, but there are files of 2"),
    (
        ZERO3,
        "layout/--context-parallel-size",
        lambda _: 2,
        "has 4 partitions of the optimizer, but there are files of 2",
    ),
    *(
        ("dp1", "layout", lambda sizes, names=names: sizes | dict.fromkeys(names, 1 << 20), f"has {1 << 40:,} ranks, m")
        for names in (("data-parallel size", "--ds-sequence-parallel-size"), (TP_SIZE, "--pipe-parallel-size"))
    ),
    ("dp1", "ledger/0/end_place", lambda place: place - 1, "3 iterations have 95 samples"),
    ("dp1", "ledger", lambda ledger: ledger * 2, "iteration 3 and sample 96 are not followed by the next ones"),
    ("dp1", "consumed_tokens", lambda tokens: tokens // 2, "96 samples have"),
    ("dp1", "consumed_samples", lambda _: 32, "it ends with iteration 3 and sample 96, not 3 and 32"),
    ("dp1", "left_out_samples", lambda _: [[0, 8], [4, 12]], "the skipped samples 4 to 12 are not after sample 8"),
    ("dp1", "left_out_samples", lambda _: [[8, 0]], "the skipped samples 8 to 0"),
    ("dp1", "schedule/--lr-decay-iters", lambda _: "x", "--lr-decay-iters in schedule is no number"),
    ("dp1", "schedule/--lr-decay-iters", lambda _: None, "--lr-decay-iters in schedule is no number"),
    ("dp1", "settings/--clip-grad", lambda _: float("inf"), "--clip-grad in settings is inf, which is no number"),
    ("dp1", "schedule/--lr", lambda _: float("nan"), "--lr in schedule is nan, which is no number"),
    ("dp1", "config/ds_config/optimizer", lambda _: [], "the optimizer in ds_config is not an object"),
    ("dp1", "config/ds_config/optimizer/params", lambda _: [], "the optimizer in ds_config is not an object"),
    ("dp1", "settings", lambda _: {}, "settings are missing"),
    ("dp1", "optimizer", lambda _: {"a": "b"}, "optimizer: Input should be a valid string"),
    ("dp1", "optimizer", lambda _: "\x1b[2J AdamW", "optimizer is .*, which is no name"),
    ("dp1", "ledger/0/layout", lambda _: {}, "the layout after iteration 0 is {}"),
    *(
        ("dp1", "left_out_samples", lambda _, end=end: [[0, end]], f"no run reads {end:,} samples")
        for end in (2**51, 2**59, 2**62)
    ),
]
"""A saver, a key of its ``run.json``, the change, and what is said."""


@pytest.mark.parametrize("step", [None, -5, math.nan, 1e30, 1.5, True])
def test_a_step_of_any_optimizer_is_in_range(step: Any) -> None:
    for state in ({"row_var": torch.ones(2, 1), "col_var": torch.ones(1, 2)}, {"exp_avg": torch.ones(2, 2)}):
        updates = Updates(state.keys(), 3)
        assert check_state("file", "w", {**state, "step": torch.tensor(3.0)}, (2, 2), updates) == 3
        assert check_state("file", "w", state, (2, 2), updates) is None
        with pytest.raises(CheckpointError, match="file: w.step is "):
            check_state("file", "w", {**state, "step": step}, (2, 2), updates)


@pytest.mark.parametrize(("is_early", "is_ignored"), [(False, False), (False, True), (True, False), (True, True)])
def test_the_schedule_is_that_of_the_description(saved_on, is_early: bool, is_ignored: bool) -> None:
    """Early versions described that of the flags, which a run may ignore."""
    saved = tag_at(saved_on("dp1") / "global_step3")
    content = torch.load(saved.path / RANK, weights_only=False)
    description = {
        name: value for name, value in saved.description.items() if not (is_early and name == "lr_scheduler")
    }
    description["config"] = {**saved.config, "optim": {"use_checkpoint_lr_scheduler": is_ignored}}
    saved = replace(saved, description=description)
    assert check_counts("file", content, saved, progress=True) == 3
    content["lr_scheduler"]["start_lr"] = 5.0
    assert check_counts("file", content, saved, progress=False) == 3
    with nullcontext() if is_early and is_ignored else pytest.raises(CheckpointError, match="start_lr is 5.0, and "):
        check_counts("file", content, saved, progress=True)


def test_a_description_that_does_not_fit_is_refused(saved_on, tmp_path: Path) -> None:
    for number, (saver, key, value, text) in enumerate(DESCRIPTIONS):
        tag = shutil.copytree(saved_on(saver) / "global_step3", tmp_path / str(number) / "global_step3")
        assert tag_at(tag).iteration == 3
        description = json.loads((tag / "run.json").read_text())
        (tag / "run.json").unlink()
        (tag / "manifest.json").unlink()
        description["layout"].setdefault("--context-parallel-size", None)
        put(key, value)(description)
        write_description(tag, description)
        with pytest.raises(CheckpointError, match=text) as caught:
            tag_at(tag)
        assert str(caught.value).startswith(str(tag / "run.json"))
