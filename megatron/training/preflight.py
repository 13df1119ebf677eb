"""Checks before torch is imported: input files exist, outputs can be written, the checkpoint is compatible."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from megatron.checkpoint.folder_lock import LOCK, check_unlocked
from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.safetensors_files import FLOATS, read_entries
from megatron.checkpoint.snapshot_files import check_memory
from megatron.checkpoint.tracker import LATEST, TRACKER, holds_checkpoint, resolve
from megatron.common.environment import ranks_on_host
from megatron.common.errors import CheckpointError, ConfigError, DataError, ResourceError, UserError
from megatron.common.output_paths import file_problem, folder_problem, outputs_in_one_place
from megatron.common.reading import regular
from megatron.common.tokenizer_files import NULL_TOKENIZER, check_tokenizer_folder, used_merges
from megatron.config import RunConfig
from megatron.config.data import MOCK_DATA, loss_mask_prefix
from megatron.config.model import padded_vocabulary
from megatron.data.datasets import check_data, split_samples
from megatron.data.fingerprint import (
    blend_hash,
    common_chat_template,
    other_tokenizers,
    tokenizer_hash,
    without_tokenizer,
)
from megatron.data.image_dataset import common_image_fit
from megatron.data.image_slots import with_image_slots
from megatron.data.map_cache import cache_folder
from megatron.data.splits import check_token_type
from megatron.model.architectures import architecture_of
from megatron.model.huggingface import read_config, shape_problems
from megatron.model.partition import TRACE
from megatron.tokenizer import span_vocabulary, tokenizer_of

T = TypeVar("T")


def check(run: RunConfig) -> tuple[RunConfig, SavedRun | None]:
    """Check ``run``. Returns it with vocabulary sizes and hashes, and the checkpoint that it resumes from, if any.

    With ``--skip-train`` the run that is returned has no ``--save``.

    Raises UserError with one line for each problem. Its class is the one with the smallest exit code among the
    problems: a wrong configuration takes precedence over wrong data.
    """
    errors: list[UserError] = []
    if run.train.skip_train:
        run = _attempt(errors, ConfigError, lambda: _only_reading(run)) or run
    _attempt(errors, ConfigError, lambda: _check_outputs(run))
    _attempt(errors, DataError, lambda: data_warnings(run))
    completed = _attempt(errors, DataError, lambda: _with_vocabulary(run, is_sound=not errors))
    # A checkpoint is compared with the vocabulary and the data, so both must be known.
    saved = _attempt(errors, CheckpointError, lambda: resolve(completed)) if completed is not None else None
    if completed is not None and saved is None and completed.checkpoint.load_hf:
        _attempt(errors, CheckpointError, lambda: _check_huggingface(completed))
    if run.checkpoint.save and not (run.logging.dry_run or run.logging.explain):
        folder = Path(run.checkpoint.save)
        _attempt(errors, CheckpointError, lambda: check_unlocked(folder))
    if completed is not None and not errors:
        _attempt(errors, ResourceError, lambda: _check_sizes(completed))
    sized = (
        _attempt(errors, DataError, lambda: with_image_slots(completed))
        if completed is not None and not errors
        else None
    )
    if errors or sized is None:
        first = min(errors, key=lambda error: error.exit_code)
        raise type(first)([message for error in errors for message in error.messages])
    return sized, saved


def _attempt(errors: list[UserError], kind: type[UserError], step: Callable[[], T]) -> T | None:
    """The result of ``step``, or None if it raises a UserError, which is appended to ``errors``.

    An OSError, such as a missing permission or a name that is too long, is appended as a ``kind``.
    """
    try:
        return step()
    except UserError as error:
        errors.append(error)
    except OSError as error:
        errors.append(kind(f"{error.filename}: {error.strerror}"))
    return None


def _only_reading(run: RunConfig) -> RunConfig:
    """The ``run`` of ``--skip-train``: it loads what it would resume from, and saves nothing.

    Raises ConfigError if that is nothing. Only a model of the user may have weights of its own.
    """
    config = run.checkpoint
    resumes = config.auto_resume and config.save is not None and holds_checkpoint(Path(config.save))
    load = config.save if resumes else config.load
    if load is None and config.load_hf is None and architecture_of(run.model).provider is None:
        nothing = f": --save {config.save} holds no checkpoint" if config.auto_resume else ""
        raise ConfigError(f"--skip-train has no weights to evaluate{nothing}: add --load or --load-hf")
    only_reads = replace(config, load=load, save=None, auto_resume=False, snapshot_interval=None, async_save=False)
    return replace(run, checkpoint=only_reads)


def data_warnings(run: RunConfig) -> list[str]:
    """Warnings about the data of ``run``. Raises DataError as ``check_data`` does."""
    masked_lm = architecture_of(run.model).masked_lm
    if architecture_of(run.model).provider is not None or masked_lm is None:  # None: rows of a task, already checked
        return []
    lines = check_data(run.data, split_samples(run.train), masked_lm=masked_lm)
    unknown = without_tokenizer(run.data.prefixes)
    if unknown and run.data.tokenizer_type != NULL_TOKENIZER:
        names = ", ".join(unknown[:_SHOWN]) + (f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else "")
        lines.append(f"{names}: no .tokenizer.json, so the tokenizer that made the data set cannot be compared")
    lines += [
        f"{prefix} has a loss mask, which counts only with --sft: all of its tokens are trained on"
        for prefix in run.data.prefixes
        if not run.data.sft and Path(f"{loss_mask_prefix(prefix)}.idx").exists()
    ][:_SHOWN]
    return lines


def _with_vocabulary(run: RunConfig, *, is_sound: bool) -> RunConfig:
    """``run`` with its vocabulary sizes, and with hashes of data and tokenizer if it saves or loads checkpoints."""
    data = replace(run.data, merge_file=used_merges(run.data.tokenizer_type, run.data.merge_file))
    is_provided = architecture_of(run.model).provider is not None
    if is_provided and data.vocab_file is None and (data.vocab_size is None or data.tokenizer_type != NULL_TOKENIZER):
        return replace(run, model=replace(run.model, vocab_size=data.vocab_size or 0))
    check_tokenizer_folder(data.tokenizer_type, data.tokenizer_model)
    vocabulary = tokenizer_of(data)
    if vocabulary.tokens is not None and not data.mock_data and not is_provided:
        check_token_type(data, vocabulary.tokens)
    if is_sound and not (run.checkpoint.override or data.mock_data or is_provided):
        if others := other_tokenizers(data.prefixes, vocabulary):
            raise DataError(others)
    if run.model.image_token_id >= vocabulary.vocab_size:
        raise ConfigError(
            f"--image-token-id {run.model.image_token_id} is not in the vocabulary, which ends at "
            f"{vocabulary.vocab_size - 1}: give that of the data set, or a larger --vocab-size"
        )
    multiple, ranks = run.model.make_vocab_size_divisible_by, run.parallel.model_parallel_size
    model = replace(
        run.model,
        vocab_size=vocabulary.vocab_size,
        padded_vocab_size=padded_vocabulary(vocabulary.vocab_size, ranks, multiple),
        eod_token=vocabulary.eod,
    )
    if architecture_of(run.model).is_encoder_decoder:
        model = replace(model, decoder_start_token=span_vocabulary(data).bos)
    if run.data.image_format:
        model = replace(model, image_fit=common_image_fit(data.prefixes))
    if is_sound and (run.checkpoint.save or run.checkpoint.load):
        hash_of_tokenizer = tokenizer_hash(data.tokenizer_type, data.vocab_file, data.merge_file, eod=vocabulary.eod)
        caches = partial(cache_folder, data)
        has_none = data.mock_data or is_provided
        content = "" if has_none else data.data_hash or blend_hash(data.contents, caches)
        content = MOCK_DATA if data.mock_data else content
        data = replace(data, data_hash=content, tokenizer_hash=hash_of_tokenizer)
        if data.sft:
            data = replace(data, chat_template=common_chat_template(data.prefixes))
    return replace(run, model=model, data=data)


def _check_huggingface(run: RunConfig) -> None:
    """Compare ``--load-hf`` with the run, and the headers of its files with its model. Raises CheckpointError."""
    folder = Path(str(run.checkpoint.load_hf))
    config = read_config(folder)
    if run.model.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"--load-hf {folder}: its table has {config.vocab_size} rows, and the tokenizer {run.model.vocab_size} "
            "tokens: give the tokenizer of that model"
        )
    if config.image_fit != run.model.image_fit and not run.checkpoint.override:
        raise CheckpointError(
            f"--load-hf {folder}: its processor makes squares of images by {config.image_fit}, and the data set has "
            f"them by {run.model.image_fit}: make the data set again, or add --override"
        )
    entries = read_entries(folder)
    shapes = {name: entry.shape for name, entry in entries.items()}
    files = {name: entry.file for name, entry in entries.items()}
    if problems := shape_problems(config, shapes, str(folder), files) or [
        f"{entry.file}: {name} is of type {entry.dtype}, and can be {', '.join(FLOATS)}"
        for name, entry in entries.items()
        if entry.dtype not in FLOATS
    ]:
        raise CheckpointError(problems[:_SHOWN])


_SHOWN = 4
_GB = 1e9


def _check_sizes(run: RunConfig) -> None:
    """Compare lower bounds of memory with this host's memory. Raises ResourceError with a line for each excess."""
    architecture, train, model = architecture_of(run.model), run.train, run.model
    if run.logging.dry_run or run.logging.explain or architecture.provider is not None:
        return  # the run may be meant for another host, or its size is unknown
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needs: list[tuple[str, float, str]] = []  # what, bytes, flags that lower them
    if run.parallel.device == "cpu" and not run.zero.uses_nvme:
        size = 4 if run.precision.dtype == "fp32" else 2
        tokens = max(run.data.seq_length, run.data.decoder_seq_length)
        states = train.micro_batch_size * tokens * model.hidden_size * size
        states //= run.parallel.model_parallel_size * run.parallel.sequence_ranks
        needs.append(("the hidden states of one layer", states, "--batch-size, --hidden-size or the sequence length"))
        weights = size * sum(parameter.numel for parameter in architecture.named_parameters(model).values())
        weights //= run.parallel.world_size if run.zero.zero_stage == 3 else run.parallel.replica_size
        flags = "--lora-rank, " * bool(model.lora_rank) + "--num-layers or --hidden-size, or use more ranks"
        needs.append(("the weights of one rank", weights, flags))
    if run.checkpoint.snapshot_interval is not None:
        check_memory(run, ranks_on_host(os.environ) or run.parallel.world_size)
    if problems := [
        f"{what} take {size / _GB:,.0f} GB or more, and this host has {memory / _GB:,.0f} GB of memory: lower {flags}"
        for what, size, flags in needs
        if size > memory
    ]:
        raise ResourceError(problems)


def _check_outputs(run: RunConfig) -> None:
    """Check that all outputs can be written, without writing. Raises ConfigError with one line for each problem."""
    folders = {
        "--save": run.checkpoint.save,
        "--tensorboard-dir": run.logging.tensorboard_dir,
        "--trace": run.observe.trace,
        "--run-dir": run.observe.run_dir,
        "--data-cache-path": run.data.data_cache_path,
    }
    for monitor in ("csv_monitor", "tensorboard"):
        section = run.ds_config.get(monitor) or {}
        if section.get("enabled"):
            folders[f"{monitor}.output_path"] = os.path.join(
                section.get("output_path", ""), section.get("job_name", "DeepSpeedJobName")
            )
    if run.observe.profile_dir != run.observe.trace:
        folders["--profile-dir"] = run.observe.profile_dir
    folder_problems = {
        flag: folder_problem(f"{flag} {folder}:", Path(folder)) if folder else f"{flag} is empty: name a folder"
        for flag, folder in folders.items()
        if folder is not None
    }
    problems = list(folder_problems.values())
    memory = run.checkpoint.snapshot_dir
    if run.checkpoint.snapshot_interval is not None and not os.access(memory, os.W_OK | os.X_OK):
        problems.append(f"--snapshot-dir {memory}: no folder to write in; name one in memory (tmpfs)")
    if run.zero.nvme_path is not None and not Path(run.zero.nvme_path).is_dir():
        problems.append(f"--nvme-path {run.zero.nvme_path}: no such folder; name one on the NVMe device")
    profile = run.ds_config.get("flops_profiler") or {}
    profiled = profile.get("output_file") if profile.get("enabled") else None
    if profiled:
        problems.append(file_problem("flops_profiler.output_file", profiled))
    if run.logging.metrics_file is not None and not folder_problems.get("--run-dir"):
        problems.append(_metrics_problem(run.logging.metrics_file))
    if not any(problems):
        written = {flag: (folder, _FILES_IN.get(flag, (flag,))) for flag, folder in folders.items()}
        files = {"flops_profiler.output_file": profiled, "--metrics-file": run.logging.metrics_file}
        problems += outputs_in_one_place(written | {flag: (file, ("",)) for flag, file in files.items()})
    problems += _missing_trackers(run)
    if any(problems):
        raise ConfigError(problem for problem in problems if problem)


def _missing_trackers(run: RunConfig) -> list[str]:
    """A message for each tracker of experiments whose package is not installed."""
    trackers = [
        ("--wandb-project", run.logging.wandb_project, "wandb"),
        ("--mlflow-experiment", run.logging.mlflow_experiment, "mlflow"),
        *(
            (f"{name}.enabled", "true", package)
            for name, package in _MONITORS.items()
            if (run.ds_config.get(name) or {}).get("enabled")
        ),
    ]
    return [
        f"{flag} {name} needs {package}, which is not installed: pip install {package}, or remove it"
        for flag, name, package in trackers
        if name is not None and find_spec(package) is None
    ]


_MONITORS = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}
"""Sections of monitors in the DeepSpeed JSON, and the Python package that each imports."""


_FILES_IN = {
    "--save": (LATEST, TRACKER, LOCK, "ds_config.json", "run.yaml", "stragglers.json", "elastic.jsonl"),
    "--trace": (TRACE, "schedule.svg", "profile-rank0.txt", "profile-rank0.json"),
    "--run-dir": ("run.json",),
}
"""Names of the files that are written into a flag's folder and are known before; those of other flags differ."""


def _metrics_problem(name: str) -> str | None:
    """Why metrics cannot be appended to the file ``name``, such as other content; None if they can."""
    flag, file = "--metrics-file", Path(name)
    if (problem := file_problem(flag, name)) or not file.is_file():
        return problem
    with open(file, "rb", opener=regular) as opened:
        line = opened.readline(_LONGEST_METRICS)
    return f"{flag} {file} holds something else; name another file" if line and b'"iteration": ' not in line else None


_LONGEST_METRICS = 1 << 20
