"""Writes ``torch.save`` files, and reads ``torch.save`` and safetensors files without executing code in them."""

import copyreg
import io
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import safetensors
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, TypedStorage, UntypedStorage
from torch._weights_only_unpickler import Unpickler

from megatron.checkpoint.files import NewFile, Record
from megatron.checkpoint.safetensors_files import broken, read_entries
from megatron.common.errors import CheckpointError, first_line
from megatron.common.reading import check_archive

ALLOWED = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
"""Classes in DeepSpeed's files in addition to tensors and plain values. Creating them has no side effects."""
# By value: Python 3.11.0 to 3.11.3 write the member of an enumeration as a call of getattr, which is not loaded.
copyreg.pickle(cast(Any, ZeroStageEnum), lambda stage: (ZeroStageEnum, (int(stage),)))


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


def read_file(path: Path, *, mapped: bool = False, outlines: bool = False) -> Any:
    """The content of ``path``, on the CPU, without comparing its hash.

    ``mapped`` memory-maps the tensors. With ``outlines`` no tensor is read; they are on the meta device. Raises
    CheckpointError if the file is missing or damaged, or would run code.
    """
    try:
        if mapped or outlines:  # torch maps a record without comparing its size
            content = _checked(path, ALLOWED, lambda: _load_outlines(path), has_data=False)
        return content if outlines else load_plain(path, ALLOWED, map_location="cpu", mmap=mapped)
    except Exception as error:  # torch raises many types for a damaged file
        if unsafe := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(f"{path} asks for {unsafe[1]}, which could run code; it is not loaded") from None
        raise CheckpointError(f"{path} cannot be read ({first_line(error)})") from error


def _load_outlines(path: Path) -> Any:
    """The content of ``path`` with tensors on the meta device, whose storages have their place in the file.

    ``torch.load`` would compute the places from the sizes, as if no other program had written the file.
    """
    reader: Any = torch._C.PyTorchFileReader(str(path))
    if reader.has_record("byteorder") and reader.get_record("byteorder").decode() != sys.byteorder:
        raise ValueError("it was written on a machine with another byte order")

    def storage(saved: tuple[Any, ...]) -> TypedStorage:
        _, kind, key, _, count = saved
        dtype = torch.uint8 if kind is UntypedStorage else kind.dtype
        size, name = count * dtype.itemsize, f"data/{key}"
        if size != (found := reader.get_record_size(name)):
            raise ValueError(f"{name} has {found:,} bytes, and its tensors need {size:,}")
        untyped = UntypedStorage(size, device="meta")
        untyped._checkpoint_offset = reader.get_record_offset(name)
        return TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)

    unpickler: Any = Unpickler(io.BytesIO(reader.get_record("data.pkl")), encoding="utf-8")
    unpickler.persistent_load = storage
    try:
        return unpickler.load()
    except NotImplementedError:
        raise ValueError("it holds a quantized or nested tensor, not a dense one of floating point") from None


def load_plain(path: Path, allowed: Sequence[Any], **options: Any) -> Any:
    """Call ``torch.load`` with the allowed classes and ``options``, without warnings. Raises the errors of torch.

    Also raises ValueError for content that no file of this project or of Megatron has: see ``_check_content``.
    """
    return _checked(path, allowed, lambda: torch.load(path, weights_only=True, **options), has_data=True)


def _checked(path: Path, allowed: Sequence[Any], load: Callable[[], Any], *, has_data: bool) -> Any:
    check_archive(path)
    with torch.serialization.safe_globals([*allowed]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tensor types that _check_content rejects
        _check_content(content := load(), has_data=has_data)
    return content


_DEEPEST, _LARGEST = 64, 1 << 26


def _check_content(content: Any, *, has_data: bool) -> None:
    """Raise ValueError for containers that are nested too deep (or contain themselves) or have too many values, and for
    tensors that are sparse, quantized, larger than their data, or without data although the file ``has_data``.
    """
    counted: dict[int, int] = {}

    def count(value: Any, depth: int, name: str = "") -> int:
        """Number of values in ``value``; a value that occurs several times is counted each time."""
        if not isinstance(value, Mapping | list | tuple):
            if kind := "without data" if has_data and isinstance(value, Tensor) and value.is_meta else _unusual(value):
                raise ValueError(f"{name or 'it'} is {kind}")
            return 1
        if id(value) not in counted:
            if depth > _DEEPEST:
                raise ValueError("it is nested too deep")
            parts = value.items() if isinstance(value, Mapping) else enumerate(value)
            counted[id(value)] = 1 + sum(count(part, depth + 1, str(key)) for key, part in parts)
        return counted[id(value)]

    if (values := count(content, 0)) > _LARGEST:
        raise ValueError(f"it unfolds to {values:,} values")


def _unusual(value: Any) -> str | None:
    """Description of an unsupported kind of tensor or storage; None for a dense tensor and any other value."""
    if isinstance(value, TypedStorage | UntypedStorage):
        return "a storage, not a tensor"
    if not isinstance(value, Tensor):
        return None
    if value.layout != torch.strided or value.is_nested:
        return f"a {'nested' if value.is_nested else str(value.layout).removeprefix('torch.')} tensor, not a dense one"
    if value.is_neg() or value.is_conj():
        return f"a lazily {'negated' if value.is_neg() else 'conjugated'} view, not a tensor with its numbers"
    if value.is_quantized:
        return f"a quantized tensor of type {str(value.dtype).removeprefix('torch.')}, not one of floating point"
    if value.nbytes > (size := value.untyped_storage().nbytes()):
        return f"a tensor of {value.nbytes:,} bytes with {size:,} bytes of data"
    return None


def check_identity(path: Path, iteration: int) -> None:
    """Raise CheckpointError if ``path`` would run code, or if the name or iteration recorded in it differs; files of
    earlier versions have no record. Reads no tensor.
    """
    content = read_file(path, mapped=True)
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

    def part(self, name: str, dim: int, begin: int, end: int) -> Tensor:
        """Slice ``begin`` to ``end`` of dimension ``dim`` of a tensor; the rest is not read."""
        with self._errors(name):
            return self._file(name).get_slice(name)[tuple([slice(None)] * dim + [slice(begin, end)])]

    def _whole(self, name: str) -> Tensor:
        with self._errors(name):
            return self._file(name).get_tensor(name)

    def _file(self, name: str) -> Any:
        file = self._entries[name].file
        if file not in self._opened:
            self._opened.clear()  # keep one file open: tensors are mostly read in the order of files
            self._opened[file] = safetensors.safe_open(file, framework="pt")
        return self._opened[file]

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (safetensors.SafetensorError, OSError) as error:
            raise broken(self._entries[name].file, error) from None
