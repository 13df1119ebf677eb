"""Writes durable files with hashes, and the manifest of a checkpoint. No torch here.

Files are always created: an existing name, even a symbolic link, is an error. ``megatron.common.files`` sets their
permissions.

``manifest.json`` has size and hash of each file of a checkpoint. It is written last, so it marks a complete checkpoint:

{"format": 1, "files": {"run.json": {"size": 4096, "xxh128": "…"}, …}, "sha256": "… of format and files"}

Earlier versions saved a ``sha256`` of each file as well; the earliest saved only that.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_128, xxh3_128_digest

from megatron.common.errors import CheckpointError, ResourceError, first_line
from megatron.common.files import file_mode, folder_mode, lacks_inodes, replace_file, sync, sync_folder
from megatron.common.reading import LARGEST_JSON, read_bytes, regular

SAVE_ADVICE = "free some space, keep fewer checkpoints with --keep-last, or name another folder"
_BLOCK = 1 << 20
_READERS = min(4, len(os.sched_getaffinity(0)))
"""Number of threads that verify a file."""
_ASKED_AT_ONCE = 16
"""Number of concurrent requests for file sizes, since network file systems answer slowly."""
Content = bytes | bytearray | memoryview
_NO_DISKS = ("proc", "sys")
"""Folders of the root whose permissions do not say that nobody can create files there."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Record(NamedTuple):
    """Size and hash of a file's content."""

    size: int
    sha256: str | None = None
    """Only in checkpoints of earlier versions."""
    xxh128: str | None = None
    """XXH3-128 of the XXH3-128 digests of all blocks of 1 MiB, which several threads can verify. None in checkpoints of
    earlier versions."""


class NewFile:
    """A new file that is written sequentially, such as by ``torch.save``, and hashed while it is written."""

    def __init__(self, path: Path):
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode()), "wb")
        self._digests, self._block, self._size = xxh3_128(), xxh3_128(), 0
        self._error: OSError | None = None

    def write(self, data: Content) -> int:
        """Append ``data``. An OSError is raised only by ``close()``, since torch's writer would replace it."""
        rest = memoryview(data).cast("B")
        count = len(rest)
        while rest and self._error is None:
            room = _BLOCK - self._size % _BLOCK
            piece, rest = rest[:room], rest[room:]
            self._block.update(piece)
            self._size += len(piece)
            if self._size % _BLOCK == 0:
                self._end_block()
            try:
                self._file.write(piece)
            except OSError as error:
                self._error = error
        return count

    def flush(self) -> None:
        """Do nothing: ``close()`` flushes."""

    def _end_block(self) -> None:
        self._digests.update(self._block.digest())
        self._block.reset()

    def close(self) -> Record:
        """Flush everything to disk. Raises OSError if anything could not be written."""
        try:
            if self._size % _BLOCK:
                self._end_block()
            if self._error is not None:
                raise self._error
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            with suppress(OSError):  # closing tries again to write the buffer
                self._file.close()
        return Record(self._size, xxh128=self._digests.hexdigest())


def write_text(path: Path, text: str) -> Record:
    """Write a new UTF-8 file."""
    file = NewFile(path)
    file.write(text.encode())
    return file.close()


def copy_file(source: Path, path: Path) -> Record:
    """Copy ``source`` to a new file. Raises OSError if it cannot be read, or the file not be written."""
    with open(source, "rb", buffering=0, opener=regular) as content:
        file = NewFile(path)
        try:
            shutil.copyfileobj(content, file, _BLOCK)
        finally:
            record = file.close()
    return record


def replace_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` atomically. A symbolic link is replaced, not its target."""
    with replace_file(path, text=True) as file:
        file.write(text)


def make_folder(path: Path) -> None:
    """Create ``path`` and its missing parents."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(folder_mode(), exist_ok=True)
        sync_folder(path.parent)


def record_of(path: Path) -> Record:
    """The record of an existing file. Raises OSError if it cannot be read."""
    return Record(path.stat().st_size, xxh128=xxh128_of(path))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file. Raises OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0, opener=regular) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def xxh128_of(path: Path) -> str:
    """``Record.xxh128`` of a file. Raises OSError if it cannot be read."""
    with open(path, "rb", buffering=0, opener=regular) as file:

        def digest(offset: int) -> bytes:
            block = b""  # a network file system may return less than requested
            while more := os.pread(file.fileno(), _BLOCK - len(block), offset + len(block)):
                block += more
            return xxh3_128_digest(block)

        offsets = range(0, os.fstat(file.fileno()).st_size, _BLOCK)
        if len(offsets) < _READERS:  # starting threads would take longer
            return xxh3_128(b"".join(map(digest, offsets))).hexdigest()
        with ThreadPoolExecutor(_READERS, "read") as threads:
            return xxh3_128(b"".join(threads.map(digest, offsets))).hexdigest()


def check_disk_space(folder: Path, what: str, size: int, advice: str = SAVE_ADVICE) -> None:
    """Raise ResourceError with ``advice`` if the disk of ``folder`` has less than ``size`` bytes free for ``what``."""
    if size > shutil.disk_usage(folder).free:
        raise ResourceError(f"{_no_space(folder, what, size)}: {advice}")


@contextmanager
def disk_errors(folder: Path, what: str, size: int) -> Iterator[None]:
    """Turn an OSError in the block, which writes ``what`` of ``size`` bytes into ``folder``, into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            problem = f"{_no_space(folder, what, size)} ({error.strerror})"
            advice = "raise ulimit -f" if error.errno == errno.EFBIG else SAVE_ADVICE
            raise ResourceError(f"--save {folder}: {problem}: {advice}") from error
        file = f"{error.filename}: " if error.filename else ""
        problem = f"{what} cannot be written ({file}{error.strerror or error})"
        raise CheckpointError(f"--save {folder}: {problem}: check the disk, or name another folder") from error


def _no_space(folder: Path, what: str, size: int) -> str:
    if lacks_inodes(folder):
        return f"{what} needs new files, and the disk has no inodes left"
    free = shutil.disk_usage(folder if os.path.isdir(folder) else folder.absolute().anchor).free
    needs = f"needs {size:,} bytes" if size else "cannot be written"
    return f"{what} {needs}, and the disk has {free:,} free"


MANIFEST = "manifest.json"
FORMAT = 1

Manifest = Mapping[str, Record]
"""Records of files by their path relative to the tag, with slashes."""


def write_manifest(tag_folder: Path, records: Manifest) -> None:
    """Mark the tag as complete. Files that are missing in ``records`` are flushed to disk and hashed."""
    records = dict(records)
    for name in sorted(set(_names(tag_folder)) - set(records)):
        sync(tag_folder / name)
        records[name] = record_of(tag_folder / name)
    for folder in {(tag_folder / name).parent for name in records}:
        sync_folder(folder)
    write_text(tag_folder / MANIFEST, _render(records))
    sync_folder(tag_folder)


def read_manifest(tag_folder: Path) -> Manifest:
    """Read the manifest of a tag. Raises CheckpointError if it is missing or damaged."""
    file = tag_folder / MANIFEST
    reason = "the save was interrupted, or another program wrote the files"
    text = read_text(file, absent=f"{tag_folder} has no {MANIFEST}, which is written last: {reason}")
    try:
        content = json.loads(text)
        form = content["format"]
        records = {name: _record(**entry) for name, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{file} is damaged") from None
    if type(form) is int and form > FORMAT:
        raise CheckpointError(
            f"{file} has format {form}, but this version reads format {FORMAT}: use the version that saved it"
        )
    if text != _render(records):
        raise CheckpointError(f"{file} is damaged")
    return records


def _record(size: Any, sha256: Any = None, xxh128: Any = None, **_: Any) -> Record:
    """The record in a manifest. Raises TypeError for one of other types."""
    if type(size) is not int or not all(isinstance(digest, str | None) for digest in (sha256, xxh128)):
        raise TypeError
    return Record(size, sha256, xxh128)


def read_text(file: Path, *, largest: int = LARGEST_JSON, absent: str | None = None) -> str:
    """The content of a text file of a checkpoint.

    Raises CheckpointError if it cannot be read or is larger than ``largest``; ``absent`` is the message if it is
    missing.
    """
    try:
        return read_bytes(file, largest=largest).decode("utf-8")
    except FileNotFoundError:
        if not file.parent.exists():
            raise gone(file.parent) from None
        raise CheckpointError(absent or f"{file} is missing") from None
    except OSError as error:
        raise CheckpointError(_unreadable(file, error)) from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is not UTF-8 text") from None


def gone(place: Path) -> CheckpointError:
    """The error that ``place`` no longer exists."""
    return CheckpointError(f"{place} is gone: a run with --keep-last may have removed it meanwhile")


def check_sizes(tag_folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError if a file is missing or has a wrong size, or if there is an extra ``.pt`` file."""
    with ThreadPoolExecutor(_ASKED_AT_ONCE, "size") as threads:
        for _ in threads.map(lambda name: _check_size(tag_folder / name, manifest[name]), manifest):
            pass
    for name in _names(tag_folder):
        # DeepSpeed finds its files by pattern, and would load this one, too.
        if name.endswith(".pt") and name not in manifest:
            raise CheckpointError(f"{tag_folder / name} is not in the manifest: it was not saved with this checkpoint")


def check_content(file: Path, record: Record) -> None:
    """Raise CheckpointError if ``file`` is missing, or its size or content differs from ``record``."""
    _check_size(file, record)
    try:
        kind, saved = ("xxh128", record.xxh128) if record.xxh128 else ("SHA-256", record.sha256)
        found = xxh128_of(file) if record.xxh128 else sha256_of(file)
    except OSError as error:
        raise CheckpointError(_unreadable(file, error)) from None
    if found != saved:
        raise CheckpointError(f"{file} is damaged: its {kind} differs from the one saved in {MANIFEST}")


def _check_size(file: Path, record: Record) -> None:
    try:
        status = os.stat(file)
    except OSError as error:
        raise CheckpointError(_unreadable(file, error)) from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} is not a file")
    size = status.st_size
    if size != record.size:
        raise CheckpointError(f"{file} has {size:,} bytes, but {record.size:,} were saved")


def _unreadable(file: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{file} is missing"
    return f"{file} cannot be read ({error.strerror})"


def _render(records: Manifest) -> str:
    files = {
        name: {key: value for key, value in records[name]._asdict().items() if value is not None}
        for name in sorted(records)
    }
    content: dict[str, Any] = {"format": FORMAT, "files": files}
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1) + "\n"


def _names(tag_folder: Path) -> Iterator[str]:
    for folder, _, files in os.walk(tag_folder):
        for name in files:
            if (path := os.path.relpath(os.path.join(folder, name), tag_folder)) != MANIFEST:
                yield path


def folder_problem(named: str, folder: Path) -> str | None:
    """Why the output ``folder`` cannot be created or written to, as a message that starts with ``named``; else None."""
    if problem := _name_problem(folder):
        return f"{named} {problem}; name another folder"
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        return f"{named} {existing} is not a folder; name another folder, or move it away"
    place = os.path.realpath(existing)
    if place == "/dev" or place.split(os.sep)[1] in _NO_DISKS:  # below it /dev has disks in memory
        return f"{named} {existing} is of the system, and holds no files of users; name another folder"
    if (existing / MANIFEST).exists():
        return f"{named} {existing} is a checkpoint, and is refused with other files in it; name another"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{named} no permission to write in {existing}; name another folder, or change its permissions"
    return None


def file_problem(flag: str, name: str) -> str | None:
    """Why the file ``name`` cannot be written, as a message about ``flag``; None if it can."""
    file = Path(name)
    if problem := _name_problem(file):
        return f"{flag} {file}: {problem}; name another file"
    if is_folder_name(name):
        return f"{flag} {name} is a folder; name a file"
    if not file.exists():  # also a dangling link, which is replaced
        return folder_problem(f"{flag} {file}:", file.parent)
    if file.is_fifo() or file.is_socket():
        return f"{flag} {file} is no file, and writing to it may wait forever; name a file"
    if not os.access(file, os.W_OK):
        return f"{flag} {file}: no permission to write it; name another file, or change its permissions"
    return None


def is_folder_name(name: str) -> bool:
    """Whether ``name`` can only be a folder's: one that exists, or a name that ends in a slash."""
    return os.path.isdir(name) or os.path.basename(name) in ("", ".", "..")


def outputs_in_one_place(outputs: Mapping[str, tuple[str | Path | None, Iterable[str]]]) -> list[str]:
    """A message for each two flags of which one writes a file that the other writes as well, or needs as a folder.

    Each flag has a folder, or None if it is not given, with the names of what is written into it; or a file, with an
    empty name.
    """
    places = [
        (flag, named, os.path.realpath(os.path.join(named, name)))
        for flag, (named, names) in outputs.items()
        if named is not None
        for name in names
    ]
    problems = [
        f"{flag} {named} is what {other} {written} writes; name another file"
        for (other, written, at), (flag, named, place) in combinations(places, 2)
        if flag != other and os.path.commonpath((place, at)) in (place, at)
    ]
    return list(dict.fromkeys(problems))


def _name_problem(path: Path) -> str | None:
    """Why ``path`` is not a valid name, such as its length, a URL or an unexpanded ~ or $VARIABLE; None if it is valid.

    A URL is accepted if a folder with the name of its scheme exists.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        is_url = re.fullmatch(r"[a-z][a-z0-9+.-]+:", path.parts[0]) and not os.path.lexists(path.parts[0])
        if is_url:
            return "is a URL, and outputs are written to this host's file systems"
        new = path.relative_to(next(place for place in path.parents if os.path.lexists(place)))
        is_home = re.fullmatch(r"~\w*", path.parts[0]) and not os.path.lexists(path.parts[0])
        unexpanded = is_home or re.search(r"\$\{?[A-Za-z_]", str(new))
        return "has a ~ or a variable that no shell has replaced, maybe for its quotes" if unexpanded else None
    except OSError as error:
        return error.strerror
    except ValueError as error:  # a NUL character
        return first_line(error)
    return None
