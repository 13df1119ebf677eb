"""Output files and folders of the tools, written completely or not at all."""

import errno
import glob
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from megatron.checkpoint.commit import remove_path
from megatron.checkpoint.folder_lock import start_time
from megatron.checkpoint.manifest import MANIFEST
from megatron.common.errors import ConfigError, ResourceError, limit_advice
from megatron.common.files import UNFINISHED, lacks_inodes, replace_file, signals_raised, sync, sync_folder
from megatron.common.output_paths import folder_problem
from megatron.common.processes import machine_id
from megatron.common.reading import was_read
from megatron.common.tokenizer_files import tokenizer_files, tokenizer_kind
from megatron.config import RunConfig
from megatron.config.data import loss_mask_prefix

_DATA_SET = (".bin", ".idx", ".tokenizer.json", "_images.npy", "_image_starts.npy")
_AN_INPUT = "{flag} {path} is an input of this command; name another file"


@contextmanager
def atomic_file(path: Path, flag: str, *, binary: bool = False) -> Iterator[IO[Any]]:
    """A file to write, UTF-8 or ``binary``, that replaces ``path`` when the block ends without an exception.

    Until then it has no name, so that nothing is left of it when the process is killed. Missing parent folders are
    created. ``flag`` is the flag that named the path, for messages.

    Raises:
        ConfigError: the file cannot be written, is in a checkpoint, or is an input, which would be lost.
        ResourceError: the disk is full.
    """
    _check_outside(path, flag)
    with _os_errors(path, flag):
        path.parent.mkdir(parents=True, exist_ok=True)
        check_unread(path, flag)
        folder = None if path.is_char_device() else path.parent
        kind: dict[str, Any] = {"mode": "w+b"} if binary else {"mode": "w+", "encoding": "utf-8", "newline": "\n"}
        with TemporaryFile(dir=folder, **kind) as unnamed:
            yield unnamed
            check_unread(path, flag)
            unnamed.seek(0)
            with replace_file(path, text=not binary) as file:
                shutil.copyfileobj(unnamed, file)


def check_unread(path: Path, flag: str) -> None:
    """Raises ConfigError if this process has read the file ``path``, which would be lost."""
    if was_read(path):
        raise ConfigError(_AN_INPUT.format(flag=flag, path=path))


def check_not_read(path: Path | None, flag: str, run: RunConfig) -> None:
    """Raises ConfigError as ``check_unread``, also for data and tokenizer, which other processes read for ``run``."""
    if path is None:
        return
    check_unread(path, flag)
    data = run.data
    kind = tokenizer_kind(data.tokenizer_type, data.tokenizer_model)
    tokenizer = tokenizer_files(kind, data.vocab_file, data.merge_file, data.tokenizer_model)
    names = [name for prefix in data.prefixes for name in (prefix, loss_mask_prefix(prefix))]
    files = [*filter(None, tokenizer), *(name + ending for name in names for ending in _DATA_SET)]
    if os.path.realpath(path) in map(os.path.realpath, files):
        raise ConfigError(_AN_INPUT.format(flag=flag, path=path))


def write_texts(texts: Mapping[Path, str], flag: str) -> None:
    """Replace files of one folder by ``texts``; none if one of them cannot be written. Raises as ``atomic_file``."""
    folder = next(iter(texts)).parent
    for path in texts:
        _check_outside(path, flag)
        check_unread(path, flag)
        if path.is_dir():
            raise ConfigError(f"{flag}: {path} is a folder; name another place")
    with _os_errors(folder, flag):
        folder.mkdir(parents=True, exist_ok=True)
        with signals_raised(), TemporaryDirectory(UNFINISHED, ".", folder, ignore_cleanup_errors=True) as name:
            for path, text in texts.items():
                with replace_file(Path(name) / path.name, text=True) as file:
                    file.write(text)
            for path in texts:
                (Path(name) / path.name).replace(path)
        sync_folder(folder)


def write_json(path: Path | None, content: Any) -> None:
    """Write ``content`` to the file of ``--json``, if there is one. Raises as ``atomic_file``."""
    if path is not None:
        with atomic_file(path, "--json") as file:
            file.write(json.dumps(content, indent=2) + "\n")


@contextmanager
def atomic_path(path: Path, flag: str) -> Iterator[Path]:
    """A temporary path for a file or a folder, which becomes ``path`` when the block ends without an exception.

    ``path`` must not exist, or be an empty folder. What killed processes have left is removed. Otherwise like
    ``atomic_file``.
    """
    start = f".{path.name}.{sha256(machine_id().encode()).hexdigest()[:8]}-"  # process ids are those of this machine
    temporary = path.with_name(f"{start}{os.getpid()}{UNFINISHED}")
    with signals_raised():
        try:
            with _os_errors(path, flag):
                path.parent.mkdir(parents=True, exist_ok=True)
                for left in path.parent.glob(f"{glob.escape(start)}*{UNFINISHED}") if machine_id() else ():
                    pid = left.name.removeprefix(start).removesuffix(UNFINISHED)
                    if pid.isdecimal() and (int(pid) == os.getpid() or not start_time(int(pid))):
                        remove_path(left)
                yield temporary
                for written in (*temporary.rglob("*"), temporary):
                    sync(written)
                os.replace(temporary, path)
                sync_folder(path.parent)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary)
            temporary.unlink(missing_ok=True)


def check_vacant(path: Path, flag: str) -> None:
    """Raises ConfigError if ``path`` exists and is not an empty folder that can be replaced, or is in a checkpoint."""
    _check_outside(path, flag)
    if path.is_symlink() and path.is_dir():
        raise ConfigError(f"{flag} {path} is a link, which would be replaced; name a folder in {path.resolve()}")
    if os.path.ismount(path):
        raise ConfigError(f"{flag} {path} is where a file system is mounted; name a folder in it")
    if path.is_dir() and not any(path.iterdir()) or not os.path.lexists(path):
        if problem := folder_problem(f"{flag} {path}:", path.parent):
            raise ConfigError(problem)
        return
    raise ConfigError(f"{flag} {path} exists already; name another place, or move it away")


def _check_outside(path: Path, flag: str) -> None:
    if path.name in ("", ".."):
        raise ConfigError(f"{flag} {path} has no name of its own; name another place")
    if (path.parent / MANIFEST).exists():
        raise ConfigError(
            f"{flag} {path}: {path.parent} is a checkpoint, and is refused with other files in it; name another place"
        )


@contextmanager
def _os_errors(path: Path, flag: str) -> Iterator[None]:
    """Turn OSError into a UserError that names the flag."""
    try:
        yield
    except OSError as error:
        problem = f"{flag} {path}: cannot be written ({error.strerror})"
        if (advice := limit_advice(error)) is None:
            raise ConfigError(f"{problem}; name another place") from error
        if error.errno == errno.ENOSPC and lacks_inodes(path.parent):
            advice = "the disk has no inodes left: remove files"
        raise ResourceError(f"{problem}; {advice}") from error
