"""What can be seen on this host before torch is imported: files that are missing, folders that cannot be written."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from megatron.checkpoint.fingerprint import blend_hash, tokenizer_hash
from megatron.checkpoint.saved_run import SavedRun
from megatron.checkpoint.tracker import resolve
from megatron.config import RunConfig
from megatron.config.errors import CheckpointError, ConfigError, DataError, UserError
from megatron.config.model import padded_vocabulary
from megatron.data.datasets import check_data
from megatron.model.architectures import architecture_of
from megatron.tokenizer import read_vocabulary

T = TypeVar("T")


def check(run: RunConfig) -> tuple[RunConfig, SavedRun | None]:
    """``run`` with the sizes that its vocabulary decides, and the checkpoint it goes on from, if any.

    Both once everything that it names on this host is found in order.

    Raises:
        UserError: with a line for each thing that is not. Its class, and so the exit code, is that of
            the smallest exit code among them: a wrong configuration goes before wrong data.
    """
    errors: list[UserError] = []
    data, train = run.data, run.train
    _attempt(errors, ConfigError, lambda: _check_outputs(run))
    wanted = {
        "train_iters": train.train_iters,
        "eval_iters": train.eval_iters,
        "masked_lm": architecture_of(run.model).masked_lm,
    }
    _attempt(errors, DataError, lambda: check_data(data, **wanted))
    whole = _attempt(errors, DataError, lambda: _with_hashes(_with_vocabulary(run), readable=not errors))
    # A checkpoint is compared with the whole model and what it reads, so both have to be known.
    saved = _attempt(errors, CheckpointError, lambda: resolve(whole)) if whole is not None else None
    if errors or whole is None:
        gravest = min(errors, key=lambda error: error.exit_code)
        raise type(gravest)([message for error in errors for message in error.messages])
    return whole, saved


def _attempt(errors: list[UserError], kind: type[UserError], step: Callable[[], T]) -> T | None:
    """The result of ``step``; where it raises a UserError, None, and the error joins ``errors``.

    So does what the system has against a file, such as its permissions or the length of its name, as a ``kind``.
    """
    try:
        return step()
    except UserError as error:
        errors.append(error)
    except OSError as error:
        errors.append(kind(f"{error.filename}: {error.strerror}"))
    return None


def _with_vocabulary(run: RunConfig) -> RunConfig:
    vocabulary = read_vocabulary(run.data.tokenizer_type, run.data.vocab_file, run.data.merge_file)
    multiple, ranks = run.model.make_vocab_size_divisible_by, run.parallel.model_parallel_size
    model = replace(
        run.model,
        vocab_size=vocabulary.size,
        padded_vocab_size=padded_vocabulary(vocabulary.size, ranks, multiple),
        eod_token=vocabulary.eod,
    )
    return replace(run, model=model)


def _with_hashes(run: RunConfig, *, readable: bool) -> RunConfig:
    """``run`` with what tells its data and tokenizer from others, where a checkpoint remembers or compares them."""
    data = run.data
    if not (readable and (run.checkpoint.save or run.checkpoint.load)):
        return run
    data = replace(
        data,
        data_hash=blend_hash(data.contents),
        tokenizer_hash=tokenizer_hash(data.tokenizer_type, data.vocab_file, data.merge_file),
    )
    return replace(run, data=data)


def _check_outputs(run: RunConfig) -> None:
    """Raises ConfigError with a line for each output that could not be written. Writes nothing itself."""
    folders = {
        "--save": run.checkpoint.save,
        "--tensorboard-dir": run.logging.tensorboard_dir,
        "--trace": run.observe.trace,
        "--run-dir": run.observe.run_dir,
        "--data-cache-path": run.data.data_cache_path,
    }
    if run.observe.profile_dir != run.observe.trace:
        folders["--profile-dir"] = run.observe.profile_dir
    found = {flag: _folder_problem(flag, Path(folder)) for flag, folder in folders.items() if folder is not None}
    problems = list(found.values())
    if run.zero.nvme_path is not None and not Path(run.zero.nvme_path).is_dir():
        problems.append(f"--nvme-path {run.zero.nvme_path}: no such folder; name one on the NVMe device")
    if run.logging.metrics_file is not None and not found.get("--run-dir"):
        problems.append(_file_problem("--metrics-file", Path(run.logging.metrics_file)))
    if any(problems):
        raise ConfigError(problem for problem in problems if problem)


def _folder_problem(flag: str, folder: Path) -> str | None:
    """What keeps ``folder`` from being written to, or from being made where it is not there yet."""
    if fault := _name_problem(folder):
        return f"{flag} {folder}: {fault}; name another place"
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
    if not existing.is_dir():
        return f"{flag} {folder}: {existing} is not a folder; name another place, or move it away"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{flag} {folder}: no permission to write in {existing}; name another place, or change its permissions"
    return None


def _file_problem(flag: str, file: Path) -> str | None:
    """What keeps ``file`` from being written."""
    if fault := _name_problem(file):
        return f"{flag} {file}: {fault}; name another file"
    if not os.path.lexists(file):
        return _folder_problem(flag, file.parent)
    if file.is_dir():
        return f"{flag} {file} is a folder; name a file"
    if not os.access(file, os.W_OK):
        return f"{flag} {file}: no permission to write it; name another file, or change its permissions"
    return None


def _name_problem(place: Path) -> str | None:
    """What the system has against the name of ``place``, whether there is anything there or not."""
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror
    return None
