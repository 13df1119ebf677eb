"""Chooses kernels by device and model, with reasons. No torch here: ``--explain`` and the planner use it as well."""

from typing import NamedTuple

from megatron.config import ModelConfig

SHORTEST_BLOCK, LONGEST_CHUNK = 128, 512
"""Tokens: shorter documents share a block; windows are computed in chunks of at most LONGEST_CHUNK."""

_UNFUSED_OPTIONS = {
    "attention_softmax_in_fp32": "--attention-softmax-in-fp32",
    "apply_query_key_layer_scaling": "--apply-query-key-layer-scaling",
}
"""Options that no fused kernel supports."""


class DeviceFacts(NamedTuple):
    """Properties of a device that the choice of kernels depends on."""

    kind: str
    """cpu, cuda, rocm or another torch device type."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, such as (8, 0); None if unknown, which is treated as a recent one."""
    has_fused_kernels: bool = True
    """Whether torch was built with fused attention kernels for this device."""
    has_varlen: bool = True
    """Whether torch has a ``varlen_attn`` with windows: 2.11 or later."""


class AttentionKernel(NamedTuple):
    """An attention kernel chosen by ``attention_kernel``."""

    name: str
    """flash, memory-efficient, plain (unfused), or torch's if torch decides."""
    limits: str
    """How documents, padding and windows are masked: none; varlen (one call of torch's ``varlen_attn``); blocks (a call
    for each document or part of a window); or mask."""
    summary: str
    """One line: the kernel, what it is used for, and the reasons."""

    @property
    def keeps_scores(self) -> bool:
        """Whether the attention scores are kept for the backward pass."""
        return self.name == "plain"

    @property
    def shares_keys(self) -> bool:
        """Whether it supports grouped-query attention without copying keys and values for each query head."""
        return self.name == "flash"


def attention_kernel(
    model: ModelConfig,
    device: DeviceFacts,
    *,
    causal: bool,
    seq_length: int,
    has_dropout: bool | None = None,
) -> AttentionKernel:
    """The attention kernel for sequences of ``seq_length`` on ``device``; by default with the dropout of training.

    Flash attention supports fp16 and bf16, head sizes up to 256, and compute capability 8.0 or later. The
    memory-efficient kernel supports fp32 and older devices. Neither stores scores. ``varlen_attn`` is flash attention
    for documents packed into one sequence; it has no dropout.
    """
    dtype = model.dtype
    has_dropout = bool(model.attention_dropout) if has_dropout is None else has_dropout
    name, why = _kernel(model, device, dtype, has_dropout)
    if model.encoder_num_layers:
        name = "memory-efficient" if name == "flash" and device.kind == "cuda" else name
        reasons = why or "a mask hides padding and later tokens"
        return AttentionKernel(name, "mask", f"{name} ({dtype}, head dim {model.head_size}, by mask): {reasons}")
    limits, why_limits = "none", ""
    window = causal and model.pre_tokens < seq_length - 1
    if model.reset_attention_mask or window or not causal:
        limits, why_limits = _limits(model, device, name, has_dropout, causal)
    parts = [
        dtype,
        f"head dim {model.head_size}",
        "causal" if causal else "padding masked",
        *(["separate documents"] if causal and model.reset_attention_mask else []),
        *([f"window of {model.pre_tokens} tokens"] if window else []),
        *([f"by {limits}"] if limits != "none" else []),
    ]
    reasons = "; ".join(filter(None, (why, why_limits)))
    return AttentionKernel(name, limits, f"{name} ({', '.join(parts)})" + (f": {reasons}" if reasons else ""))


def computed_scores(model: ModelConfig, kernel: AttentionKernel, seq_length: int) -> int:
    """Maximum number of scores computed for one head and sample, with one document filling the sequence."""
    window = model.pre_tokens
    if kernel.limits != "blocks" or seq_length <= SHORTEST_BLOCK or window >= seq_length - 1:
        return seq_length**2
    chunk = chunk_size(window)
    full, rest = divmod(seq_length, chunk)
    growing = min(full, -(-window // chunk))  # full chunks with fewer preceding tokens than the window
    preceding = chunk * growing * (growing - 1) // 2 + window * (full - growing)
    return chunk * (preceding + chunk * full) + rest * (min(window, seq_length - rest) + rest)


def chunk_size(window: int) -> int:
    """Tokens per chunk in sliding-window attention over ``window`` preceding tokens."""
    return min(max(window, SHORTEST_BLOCK), LONGEST_CHUNK)


def _kernel(model: ModelConfig, device: DeviceFacts, dtype: str, has_dropout: bool) -> tuple[str, str]:
    """The kernel's name, and why it is not flash attention."""
    for field, flag in _UNFUSED_OPTIONS.items():
        if getattr(model, field):
            return "plain", f"{flag} needs the scores"
    if model.has_relative_positions:
        return "plain", "the bias of relative positions needs the scores"
    if device.kind == "cpu":
        return ("plain", "torch's fused kernel for CPUs has no dropout") if has_dropout else ("flash", "")
    if device.kind != "cuda":
        return "torch's", f"torch chooses it on {device.kind}"
    if not device.has_fused_kernels:
        return "plain", "this torch has no fused kernels for this device"
    no_flash = _why_no_flash(model.head_size, device.capability or (9, 0), dtype)
    if not no_flash:
        return "flash", "" if device.capability else "on compute capability 8.0 or later"
    neither = _why_not_memory_efficient(model.head_size, device.capability or (9, 0), dtype)
    return ("plain", f"{no_flash}, {neither}") if neither else ("memory-efficient", no_flash)


def _why_no_flash(head_size: int, capability: tuple[int, int], dtype: str) -> str:
    if dtype == "fp32":
        return "fp32 has no flash kernel on CUDA"
    if capability < (8, 0):
        return f"flash attention needs compute capability 8.0, and this is {_version(capability)}"
    if head_size > 256 or (head_size > 192 and capability not in ((8, 0), (9, 0), (10, 0))):
        return f"flash attention has no head dim {head_size} on compute capability {_version(capability)}"
    return ""


def _why_not_memory_efficient(head_size: int, capability: tuple[int, int], dtype: str) -> str:
    if dtype == "bf16" and capability < (8, 0):
        return "and the memory-efficient kernel has no bf16 there"
    multiple = 8 if dtype != "fp32" else 4 if capability >= (8, 0) else 1
    if head_size % multiple:
        return f"and the memory-efficient kernel needs a head dim that is a multiple of {multiple}"
    return ""


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _limits(model: ModelConfig, device: DeviceFacts, name: str, has_dropout: bool, causal: bool) -> tuple[str, str]:
    """How documents and windows are masked (see ``AttentionKernel.limits``), and why not with ``varlen_attn``."""
    why = ""
    if device.kind == "cuda" and name == "flash":
        if has_dropout:
            why = "varlen_attn has no dropout"
        elif model.head_size % 8:
            why = "varlen_attn needs a head dim that is a multiple of 8"
        elif not device.has_varlen:
            why = "varlen_attn needs torch 2.11"
        else:
            return "varlen", ""
    # A call for each sample would be slow on a GPU. Samples of bidirectional models are short.
    return ("blocks", why) if causal or device.kind == "cpu" else ("mask", why)


def runs_in_fp8(model: ModelConfig, inputs: int, outputs: int, ranks: tuple[int, int] = (1, 1)) -> bool:
    """Whether a linear layer runs in FP8; ``ranks`` are the numbers of ranks that shard ``inputs`` and ``outputs``.

    Small matmuls gain nothing; tensor cores need multiples of 16. The unsharded sizes decide what is small, so that
    the result does not depend on the layout.
    """
    if model.fp8_format == "none" or min(inputs, outputs) < model.fp8_min_size:
        return False
    return not any(size % (16 * parts) for size, parts in zip((inputs, outputs), ranks, strict=True))


def why_no_fp8(device: DeviceFacts) -> str:
    """Why ``device`` does not support FP8; empty if it does."""
    if device.kind not in ("cpu", "cuda"):
        return f"FP8 on {device.kind} is not supported"
    if (device.capability or (9, 0)) < (8, 9):
        return f"FP8 needs compute capability 8.9, and this is {_version(device.capability or (0, 0))}"
    return ""


ELEMENTS_AT_ONCE = {"cpu": 1 << 19}
"""Logits that the loss converts at a time, by device type; on a CPU as many as fit its caches."""
MOST_AT_ONCE = 1 << 27
"""Logits that the loss converts at a time on other devices."""


def compiles_loss(device: str) -> bool:
    """Whether the loss is compiled into one kernel per pass over the logits: 8 bytes per bf16 logit instead of 34."""
    return device == "cuda"


def rows_at_once(columns: int, device: str) -> int:
    """Rows of ``columns`` logits that the uncompiled loss converts at a time."""
    return max(1, ELEMENTS_AT_ONCE.get(device, MOST_AT_ONCE) // columns)
