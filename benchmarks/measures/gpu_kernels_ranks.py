"""Started by ``benchmarks/gpu``: kernels that only a GPU has, forward and backward, against plain torch in fp64.

Reports for each kernel and data type the largest relative difference ||found - expected|| / ||expected|| of its output
and gradients, or why it failed; and for each kind of attention whether torch takes the kernel that
``attention_kernel`` names.

b batch, n heads of queries, g heads of keys and values, s sequence, d size of a head, h hidden
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measures.ranks import report
from megatron.config import ModelConfig, ParallelConfig
from megatron.launch.distributed import distributed
from megatron.model.architectures import GPT2
from megatron.model.moe import MoEParallelTransformerLayer
from megatron.model.transformer import ParallelTransformerLayer
from megatron.ops import linear
from megatron.ops.activation import bias_gelu, dropout_add, lean_swiglu
from megatron.ops.attention import device_facts
from megatron.ops.choices import attention_kernel
from megatron.ops.cross_entropy import CompiledCrossEntropyKernel, CrossEntropyKernel
from megatron.ops.packed_attention import attend_in_blocks, attend_varlen, dense_mask
from megatron.ops.partial_attention import PartialAttention, merge
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.tensor.random import model_parallel_manual_seed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 2e-3}
"""Largest relative difference from fp64."""
COMPILED = ("fp32", "bf16")
"""In which layers are compiled, too."""
B, N, S, H = 2, 8, 640, 512
ALL = 65536
LAYER = ModelConfig(
    num_layers=2, hidden_size=H, ffn_hidden_size=4 * H, num_attention_heads=N, max_position_embeddings=S,
    attention_dropout=0.0, hidden_dropout=0.0, init_method_std=0.05, architecture=GPT2.name,
)  # fmt: skip
LLAMA = replace(
    LAYER, num_query_groups=2, group_query_attention=True, swiglu=True, normalization="RMSNorm",
    disable_bias_linear=True, position_embedding_type="rope",
)  # fmt: skip
LAYERS = {
    "GPT-2's layer": LAYER,
    "Llama's layer": LLAMA,
    "a layer of packed documents": replace(LAYER, reset_attention_mask=True),
    "a layer with windows and shared keys": replace(LLAMA, pre_tokens=100),
    "a layer with experts": replace(LLAMA, num_experts=4, moe_grouped_gemm=True),
}
_BACKENDS = {0: "plain", 1: "flash", 2: "memory-efficient", 3: "cuDNN's flash"}
_IS = {"flash": ("flash", "cuDNN's flash")}
"""cuDNN has flash attention of its own, which torch prefers on some GPUs."""


class Case(NamedTuple):
    """A kernel on ``inputs``, and what it stands for; both return the output."""

    name: str
    dtype: str
    inputs: list[Tensor]
    kernel: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    weights: Sequence[Tensor] = ()
    """Parameters of ``kernel`` whose gradients count, too; those of ``plain`` are in the same order."""
    plain_weights: Sequence[Tensor] = ()


def main() -> None:
    """Run all cases, or those whose names contain the argument, and report."""
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    with distributed(ParallelConfig(world_size=1)) as layout:
        model_parallel_manual_seed(1, layout)
        rows = [row(case) for case in cases(layout) if chosen in case.name]
        report({"kernels": rows, "choices": list(choices())})


def row(case: Case) -> dict[str, Any]:
    """The difference of one case, or its error."""
    found: dict[str, Any] = {"kernel": case.name, "dtype": case.dtype, "bound": BOUNDS[case.dtype]}
    print(f"{case.name}, {case.dtype}", file=sys.stderr, flush=True)
    try:
        difference = difference_of(case)
    except Exception as error:  # whatever it is, the other kernels are run
        print(f"{case.name}, {case.dtype}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return found | {"difference": None, "agrees": False, "failure": f"{type(error).__name__}: {error}"[:300]}
    return found | {"difference": difference, "agrees": difference <= BOUNDS[case.dtype], "failure": None}


def difference_of(case: Case) -> float:
    """The largest relative difference of output and gradients, twice, so that a kernel which races shows it."""
    wide = [tensor.detach().double().requires_grad_() for tensor in case.inputs]
    expected = case.plain(*wide)
    grad = torch.randn_like(expected, dtype=torch.float32).to(DTYPES[case.dtype])
    wanted = [expected.detach(), *torch.autograd.grad(expected, [*wide, *case.plain_weights], grad.double())]
    largest = 0.0
    torch.compiler.reset()  # each case is a few of the graphs that a function may have
    for _ in range(2):
        narrow = [tensor.detach().requires_grad_() for tensor in case.inputs]
        output = case.kernel(*narrow)
        found = [output.detach(), *torch.autograd.grad(output, [*narrow, *case.weights], grad.to(output.dtype))]
        for one, other in zip(found, wanted, strict=True):
            difference = float((one.double() - other).norm() / other.norm())
            largest = max(largest, difference if math.isfinite(difference) else math.inf)
    return largest


def cases(layout: ParallelLayout) -> Iterator[Case]:
    """All kernels in all types that they have."""
    for dtype in DTYPES:
        yield from _attention(dtype)
        yield from _parts(dtype, layout)
        for name, config in LAYERS.items():
            yield from _layers(name, config, dtype, layout)


def _attention(dtype: str) -> Iterator[Case]:
    for groups, window, apart in ((2, ALL, True), (2, 100, False), (N, 100, True)):
        ids = _documents() if apart else None
        kind = (
            f"{'documents' if apart else 'no documents'}, {'no window' if window == ALL else 'window'}, {groups} keys"
        )
        inputs, plain = _heads(dtype, groups), partial(_plain, ids=ids, window=window)
        if dtype != "fp32":
            varlen = partial(attend_varlen, segment_ids=ids, window=window)
            yield Case(f"varlen_attn: {kind}", dtype, inputs, varlen, plain)
        blocks = partial(attend_in_blocks, segment_ids=ids, window=window, core=_core)
        yield Case(f"attention by blocks: {kind}", dtype, inputs, blocks, plain)
    for fused, groups in product((True, False), (N, 2)):
        if not (fused and dtype == "fp32"):
            ring = partial(_InParts.apply, PartialAttention(fused))
            name = f"attention of a ring: {'flash' if fused else 'step by step'}, {groups} keys"
            yield Case(name, dtype, _heads(dtype, groups), lambda *qkv, ring=ring: ring(*qkv), _plain)


def _parts(dtype: str, layout: ParallelLayout) -> Iterator[Case]:
    hidden, weight = _randn(dtype, B, S, H), 1 + 0.1 * _randn(dtype, H)
    yield Case("RMSNorm", dtype, [hidden, weight], lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), _rms_norm)
    yield Case("SwiGLU", dtype, [hidden], lean_swiglu, lambda x: F.silu(x[..., : H // 2]) * x[..., H // 2 :])
    fused = replace(LAYER, bias_gelu_fusion=True, bias_dropout_fusion=True)
    yield Case("--bias-gelu-fusion", dtype, [hidden, weight], bias_gelu(fused), lambda x, b: F.gelu(x + b))
    join = dropout_add(fused)
    other = _randn(dtype, B, S, H)
    yield Case("--bias-dropout-fusion", dtype, [hidden, other], lambda x, y: join(x, y, 0.0), torch.add)
    labels = torch.randint(H - 5, (B, S), device=hidden.device)
    places = {"labels": labels, "group": layout.tensor_group, "vocab_size": H - 3}
    plain_loss = lambda x: F.cross_entropy(x[..., :-3].movedim(-1, 1), labels, reduction="none")  # noqa: E731
    for compiled in (False, True):
        kernel = CompiledCrossEntropyKernel() if compiled else CrossEntropyKernel()
        loss = partial(vocab_parallel_cross_entropy, **places, kernel=kernel)
        title = f"cross entropy, {'compiled' if compiled else 'as it is'}"
        yield Case(title, dtype, [8 * _randn(dtype, B, S, H)], loss, plain_loss)
    counts = [300, 1, 0, 517, 206]
    rows, matrices = _randn(dtype, sum(counts), H), 0.1 * _randn(dtype, 5, 384, H)
    for grouped in (True, False) if dtype == "bf16" else (False,):
        name = f"matmuls of the experts, {'grouped' if grouped else 'one by one'}"
        yield Case(
            name, dtype, [rows, matrices], partial(_experts, grouped=grouped, counts=counts), _each_expert(counts)
        )


def _layers(name: str, config: ModelConfig, dtype: str, layout: ParallelLayout) -> Iterator[Case]:
    if config.has_experts and dtype != "fp32":
        return  # tokens that are near to two experts go to another one
    config = replace(config, dtype=dtype)
    hidden = _randn(dtype, B, S, H)
    ids = _documents() if config.reset_attention_mask else None
    layer_class = MoEParallelTransformerLayer if config.has_experts else ParallelTransformerLayer
    for compiled in (False, True) if dtype in COMPILED else (False,):
        layer = layer_class(replace(config, compile=compiled), layout, layer_number=1)
        layer = layer.to(hidden.device, DTYPES[dtype])
        wide = layer_class(replace(config, moe_grouped_gemm=False, dtype="fp32"), layout, layer_number=1)
        wide = wide.to(hidden.device, torch.float64)
        wide.load_state_dict(layer.state_dict())
        title = f"{name}, {'compiled' if compiled else 'as it is'}"
        weights, plain_weights = [*layer.parameters()], [*wide.parameters()]
        kernel, plain = partial(_through, layer, ids), partial(_through, wide, ids)
        yield Case(title, dtype, [hidden], kernel, plain, weights, plain_weights)


def _through(layer: torch.nn.Module, ids: Tensor | None, hidden: Tensor) -> Tensor:
    found = layer(hidden if ids is None else (hidden, ids))
    return found if ids is None else found[0]


def choices() -> Iterator[dict[str, Any]]:
    """Whether torch takes the kernel that ``attention_kernel`` names, for each type, size of a head, and sharing."""
    device = torch.device(get_accelerator().current_device_name())
    for dtype, size, groups, dropout in product(DTYPES, (32, 64, 72, 128, 256, 264), (N, 2), (0.0, 0.1)):
        config = replace(LAYER, hidden_size=N * size, attention_dropout=dropout)
        config = replace(config, num_query_groups=groups, group_query_attention=groups < N)
        model = replace(config, dtype=dtype)
        named = attention_kernel(model, device_facts(device), causal=True, seq_length=S)
        query, key, value = _heads(dtype, groups if named.shares_keys else N, size)
        shares = query.size(1) != key.size(1)
        try:
            choice = torch._fused_sdp_choice(query, key, value, None, dropout, True, enable_gqa=shares)
        except RuntimeError as error:
            choice = str(error)
        found = _BACKENDS.get(choice, str(choice))
        what = f"{dtype}, head dim {size}, {groups} of {N} keys, dropout {dropout}"
        yield {"what": what, "named": named.name, "found": found, "agrees": found in _IS.get(named.name, (named.name,))}


def _randn(dtype: str, *size: int) -> Tensor:
    device = get_accelerator().current_device_name()
    return torch.randn(*size, device=device).to(DTYPES[dtype])


def _heads(dtype: str, groups: int, size: int = 64) -> list[Tensor]:
    """query [b, n, s, d], key and value [b, g, s, d], as views of one tensor like those of a layer."""
    whole = _randn(dtype, B, S, N + 2 * groups, size).transpose(1, 2)
    return [part.detach().requires_grad_() for part in whole.split([N, groups, groups], 1)]


def _documents() -> Tensor:
    """Segment ids [b, s] of documents of several lengths."""
    ends = torch.zeros(B, S, dtype=torch.int32)
    ends[0, [3, 130, 131, 400]] = 1
    ends[1, 577] = 1
    return ends.cumsum(1, dtype=torch.int32).to(get_accelerator().current_device_name())


def _plain(query: Tensor, key: Tensor, value: Tensor, ids: Tensor | None = None, window: int = ALL) -> Tensor:
    """Scores, softmax and context."""
    repeats = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.size(-1))
    seen = dense_mask(query.size(2), query.device, ids, window)
    if seen is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


def _core(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    shares = query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=shares)


class _InParts(torch.autograd.Function):
    """Causal attention in two chunks of queries and keys, as two ranks of a ring compute it together."""

    @staticmethod
    def forward(ctx: Any, kernel: PartialAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context = torch.zeros_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
        logsumexp = context.new_full(query.shape[:3], -torch.inf)
        for rows, columns, is_causal in _InParts.blocks(query.size(2)):
            part = kernel.forward(query[:, :, rows], key[:, :, columns], value[:, :, columns], None, is_causal)
            merge(context[:, :, rows], logsumexp[:, :, rows], *part)
        context = context.to(query.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, context, logsumexp)
        return context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, context, logsumexp = ctx.saved_tensors
        totals = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
        for rows, columns, is_causal in _InParts.blocks(query.size(2)):
            of_rows, of_keys = (x[:, :, rows] for x in (grad, query)), (x[:, :, columns] for x in (key, value))
            found = ctx.kernel.backward(*of_rows, *of_keys, context[:, :, rows], logsumexp[:, :, rows], None, is_causal)
            for total, part, place in zip(totals, found, (rows, columns, columns), strict=True):
                total[:, :, place] += part
        return None, *(total.to(x.dtype) for total, x in zip(totals, (query, key, value), strict=True))

    @staticmethod
    def blocks(s: int) -> list[tuple[slice, slice, bool]]:
        """Queries, keys, and whether each query attends up to itself alone."""
        first, second = slice(0, s // 2), slice(s // 2, s)
        return [(first, first, True), (second, first, False), (second, second, True)]


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _experts(rows: Tensor, matrices: Tensor, *, grouped: bool, counts: list[int]) -> Tensor:
    kernel = linear.GroupedLinearKernel() if grouped else linear.StackedLinearKernel()
    ends = torch.tensor(counts, device=rows.device).cumsum(0)
    return linear.stacked_linear(rows, matrices, kernel.rows_of(ends), kernel, lambda gradient, weight: False)


def _each_expert(counts: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    def plain(rows: Tensor, matrices: Tensor) -> Tensor:
        parts = zip(rows.split(counts), matrices, strict=True)
        return torch.cat([part @ matrix.T for part, matrix in parts])

    return plain


if __name__ == "__main__":
    main()
