"""Writes ``torch.save`` files, and reads ``torch.save`` and safetensors files without executing code in them."""

import copyreg
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import IO, Any, cast

import safetensors
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, TypedStorage, UntypedStorage
from torch.serialization import set_crc32_options

from megatron.checkpoint.files import NewFile, Record, write_text
from megatron.checkpoint.manifest import gone
from megatron.checkpoint.safetensors_files import broken, read_entries
from megatron.common.checkpoint_folders import make_subfolder
from megatron.common.errors import CheckpointError, limit_reached, reason
from megatron.common.reading import check_archive

ALLOWED = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
"""Classes in DeepSpeed's files in addition to tensors and plain values. Creating them has no side effects."""
# By value: Python 3.11.0 to 3.11.3 write the member of an enumeration as a call of getattr, which is not loaded.
copyreg.pickle(cast(Any, ZeroStageEnum), lambda stage: (ZeroStageEnum, (int(stage),)))
_AT_ONCE = 2
"""Number of files that a rank writes concurrently."""


def write_file(path: Path, content: Any) -> Record:
    """Write ``content`` to a new file, and flush it to disk. Raises OSError if it cannot be written."""
    file = NewFile(path)
    try:
        torch.save(content, cast(IO[bytes], file))  # only calls write() and flush()
    except BaseException:
        with suppress(Exception):
            file.close()
        raise
    return file.close()


def write_files(
    files: list[tuple[Path, Any]], folder: Path, stop: Event | None = None, *, crc32: bool = True
) -> dict[str, Record]:
    """Write texts and states concurrently into files of ``folder``, and free each. Ends early if ``stop`` is set.

    ``crc32=False`` makes torch skip the CRC-32 of records, which takes most of its time and is never compared.
    """

    def write(path: Path, state: Any) -> Record | None:
        if stop is not None and stop.is_set():
            return None
        make_subfolder(path, folder)
        return write_text(path, state) if isinstance(state, str) else write_file(path, state)

    use_crc32 = partial(set_crc32_options, crc32)  # a setting of the calling thread
    with ThreadPoolExecutor(_AT_ONCE, "file", initializer=use_crc32) as writers:
        written = {path.relative_to(folder).as_posix(): writers.submit(write, path, state) for path, state in files}
        files.clear()
    return {name: record for name, future in written.items() if (record := future.result()) is not None}


def read_file(path: Path) -> Any:
    """The content of ``path``, on the CPU, without comparing its hash. Its tensors are mapped into memory.

    Raises CheckpointError if the file is missing or damaged, or would run code, ResourceError at a limit of the host.
    """
    try:
        return load_plain(path, ALLOWED, map_location="cpu", mmap=True)
    except Exception as error:  # torch raises many types for a damaged file
        raise (limit_reached(path, error) or unreadable(path, error)) from error


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error for what torch could not read; without torch's advice, which is to let the file run code."""
    if unsafe := re.search(r"GLOBAL (\S+)", str(error)):
        return CheckpointError(f"{path} asks for {unsafe[1]}, which could run code; it is not loaded")
    if isinstance(error, FileNotFoundError):
        advice = f"{path} is missing: copy the whole checkpoint again, or load another one"
        return CheckpointError(advice) if path.parent.exists() else gone(path.parent)
    said = re.search(r"WeightsUnpickler error:\s+(.+)", str(error))
    return CheckpointError(f"{path} cannot be read ({said[1] if said else reason(error)})")


def load_plain(path: Path, allowed: Sequence[Any], *, mmap: bool = False, **options: Any) -> Any:
    """Call ``torch.load`` with the allowed classes and ``options``, without warnings. Raises the errors of torch.

    Also raises ValueError for content that no file of this project or of Megatron has: see ``_check_content``.
    """
    check_archive(path)
    with torch.serialization.safe_globals([*allowed]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tensor types that _check_content rejects
        content = torch.load(path, weights_only=True, mmap=mmap, **options)
    _check_content(content, path if mmap else None)
    return content


_DEEPEST, _LARGEST = 64, 1 << 26


def _check_content(content: Any, file: Path | None) -> None:
    """Raise ValueError for containers that are nested too deep (or contain themselves) or have too many values, and for
    tensors that are sparse, quantized, without data or larger than their data, which may be mapped from ``file``.
    """
    counted, storages = dict[int, int](), dict[int, int]()

    def count(value: Any, depth: int, name: str = "") -> int:
        """Number of values in ``value``; a value that occurs several times is counted each time."""
        value = vars(value) if isinstance(value, LossScalerBase) else value
        if not isinstance(value, Mapping | list | tuple):
            if kind := _unusual(value):
                raise ValueError(f"{name or 'it'} is {kind}")
            if isinstance(value, Tensor):
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return 1
        if id(value) not in counted:
            if depth > _DEEPEST:
                raise ValueError("it is nested too deep")
            parts = value.items() if isinstance(value, Mapping) else enumerate(value)
            counted[id(value)] = 1 + sum(count(part, depth + 1, str(key)) for key, part in parts)
        return counted[id(value)]

    if (values := count(content, 0)) > _LARGEST:
        raise ValueError(f"it unfolds to {values:,} values")
    if file is not None:
        _check_records(file, storages)


def _unusual(value: Any) -> str | None:
    """Description of an unsupported kind of tensor or storage; None for a dense tensor and any other value."""
    if isinstance(value, TypedStorage | UntypedStorage):
        return "a storage, not a tensor"
    if not isinstance(value, Tensor):
        return None
    kinds = {
        "nested": value.is_nested,
        str(value.layout).removeprefix("torch."): value.layout != torch.strided,
        "quantized": value.is_quantized,
        "lazily negated": value.is_neg(),
        "lazily conjugated": value.is_conj(),
    }
    if value.is_meta or any(kinds.values()):
        return next((f"a {kind} tensor, not a dense one" for kind, is_so in kinds.items() if is_so), "without data")
    if value.nbytes > (size := value.untyped_storage().nbytes()):
        return f"a tensor of {value.nbytes:,} bytes with {size:,} bytes of data"
    return None


def _check_records(path: Path, storages: Mapping[int, int]) -> None:
    """Raise ValueError unless each mapped storage has the size of its record, which torch does not compare."""
    with zipfile.ZipFile(path) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    records = [entry for entry in entries if "/data/" in entry.filename and entry.file_size]
    sizes = [size for _, size in sorted(storages.items()) if size]
    for record, size in zip(records, sizes, strict=False):
        if record.file_size != size:
            name = record.filename.partition("/")[2]
            raise ValueError(f"{name} has {record.file_size:,} bytes, and its tensors need {size:,}")
    if len(records) != len(sizes):
        raise ValueError(f"it has {len(records)} records of data for the storages of its tensors, {len(sizes)}")


def check_identity(path: Path, content: Any, iteration: int) -> None:
    """Raise CheckpointError if the name or iteration recorded in ``content``, that of ``path``, differs.

    Files of earlier versions have no record.
    """
    metadata = getattr(content, "_metadata", None)
    said = metadata.get(_IDENTITY) if isinstance(metadata, dict) else None
    if said is not None and (not isinstance(said, str) or said != _identity(path.name, iteration)):
        problem = f"is that of {_identity(path.name, iteration)}, but was saved as {str(said)[:200]}"
        raise CheckpointError(f"{path}: its name {problem}: files have been exchanged")


_IDENTITY = "file"


def _identity(name: str, iteration: int) -> str:
    return f"{name} of iteration {iteration}"


def with_identity(content: Any, name: str, iteration: int) -> Any:
    """``content`` with the file name and iteration recorded in an attribute that ``nn.Module`` and others ignore."""
    if isinstance(content, dict):
        content = OrderedDict(content)
        content._metadata = {_IDENTITY: _identity(name, iteration)}
    return content


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read on access and not kept, so that a model need not fit into memory."""

    def __init__(
        self, outlines: Mapping[str, Tensor], read: Callable[[str], Tensor], files: Mapping[str, Path] | None = None
    ) -> None:
        """``outlines`` are tensors of the same shapes and types on the meta device, ``files`` their files if known."""
        self.outlines, self._read, self.files = outlines, read, files or {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.outlines:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.outlines  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self.outlines)

    def __len__(self) -> int:
        return len(self.outlines)


def outlines_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors with the same shapes and types, without reading any."""
    return tensors.outlines if isinstance(tensors, LazyTensors) else tensors


def files_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Path]:
    """The file of each tensor of which it is known."""
    return tensors.files if isinstance(tensors, LazyTensors) else {}


def no_floats(tensors: Mapping[str, Tensor], names: Iterable[str], source: str) -> list[str]:
    """A line for each weight of ``names`` in ``tensors`` that has an integer type or FP8, which would need scales.

    It names the file of the weight or, if that is not known, ``source``.
    """
    outlines, files = outlines_of(tensors), files_of(tensors)
    types = {name: outlines[name].dtype for name in names if name in outlines}
    return [
        f"{files.get(name, source)}: {name} is of type {str(dtype).removeprefix('torch.')}, and a weight is in bf16, "
        "fp16, fp32 or fp64"
        for name, dtype in types.items()
        if not dtype.is_floating_point or dtype.itemsize == 1
    ]


class SafetensorsFiles(LazyTensors):
    """The tensors in one or several safetensors files (see ``read_entries``), each read on access."""

    def __init__(self, path: Path) -> None:
        """Read the headers. Raises CheckpointError as ``read_entries`` does."""
        self._entries = read_entries(path)
        self._opened: dict[Path, Any] = {}
        # The library maps a tensor into memory, which reads nothing of it.
        outlines = {name: self._whole(name).to("meta") for name in self._entries}
        super().__init__(outlines, self._whole, {name: entry.file for name, entry in self._entries.items()})

    def _whole(self, name: str) -> Tensor:
        file = self._entries[name].file
        try:
            if file not in self._opened:
                self._opened.clear()  # keep one file open: tensors are mostly read in the order of files
                self._opened[file] = safetensors.safe_open(file, framework="pt")
            return self._opened[file].get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise broken(file, error) from None
