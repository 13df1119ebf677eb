"""Settings of mixtures of experts and of low-rank adapters (LoRA)."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby

from megatron.config.fields import count, flag

_expert_flag = partial(flag, models="gpt", needs={"num_experts": "a single expert is an MLP"})
_causal_flag = partial(flag, models="gpt")


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Mixture of experts."""

    num_experts: int = _causal_flag(
        0,
        "Number of experts of a mixture of experts in place of the MLP (default: one MLP for all tokens).",
        within="[1, 65536]",
        multiple_of="expert_model_parallel_size",
        excludes={
            "optimizer=muon": "it takes one matrix at a time, and experts are stacked",
            "lora_rank": "adapters belong to linear layers, and experts replace the linear layers of the MLP",
            "gradient_accumulation_fusion": "it is made for linear layers, not for the matmuls of experts",
            "tiled_mlp": "there is no MLP whose tokens could be divided",
        },
    )
    moe_layer_freq: int | str = _expert_flag(
        1,
        "Every Nth layer has experts; or a list with 1 for each layer with experts, such as [0]*1+[1]*3.",
        metavar="N|LIST",
    )
    moe_ffn_hidden_size: int = _expert_flag(
        0,
        "Hidden size of each expert (default: --ffn-hidden-size).",
        within="[1, 8388608]",
        multiple_of="model_parallel_size",
    )
    moe_router_topk: int = _causal_flag(
        2,
        "Number of experts that compute each token.",
        aliases=("topk",),
        within="[1, 65536]",
        needs={
            "num_experts": "a single expert is an MLP",
            "1: moe_router_pre_softmax": "the softmax over one logit is 1, and the router has no gradient",
        },
    )
    moe_router_pre_softmax: bool = _expert_flag(
        False, "Weigh the chosen experts by a softmax over all experts, not over the chosen ones only."
    )
    moe_router_load_balancing_type: str = _expert_flag(
        "seq_aux_loss",
        "What an auxiliary loss balances the experts over: samples, the global batch or a micro-batch.",
        choices=("seq_aux_loss", "global_aux_loss", "aux_loss", "none"),
    )
    moe_aux_loss_coeff: float = _expert_flag(
        0.0,
        "Weight of the balancing loss; 0.01 is usual.",
        aliases=("moe-loss-coeff",),
        within="[0, inf)",
        excludes=("moe_router_load_balancing_type=none",),
    )
    moe_z_loss_coeff: float = _expert_flag(
        0.0,
        "Weight of the z loss, which keeps router logits small (arXiv 2202.08906); usual: 0.001.",
        within="[0, inf)",
    )
    moe_router_dtype: str = _expert_flag("fp32", "Type in which the router computes.", choices=("fp32", "fp64"))
    moe_expert_capacity_factor: float = _expert_flag(
        0.0,
        "Maximum tokens of a sample for each expert, as a multiple of an equal share; others are dropped.",
        within="(0, inf)",
    )
    moe_pad_expert_input_to_capacity: bool = _expert_flag(
        False,
        "Pad the input of each expert to its capacity, so that no tensor shape depends on the data.",
        needs="moe_expert_capacity_factor",
    )
    moe_token_dispatcher_type: str = _causal_flag(
        "alltoall",
        "How ranks exchange tokens: sent to the ranks of their experts, or gathered by all.",
        choices=("alltoall", "allgather"),
        ignored_without="expert_model_parallel_size",
    )
    moe_shared_expert_intermediate_size: int = _expert_flag(
        0,
        "Hidden size of an expert that computes every token in addition (default: none).",
        within="[1, 8388608]",
        multiple_of="model_parallel_size",
    )
    moe_grouped_gemm: bool = _expert_flag(
        True, "Compute all experts with one grouped GEMM kernel, on CUDA in bf16; enabled by default."
    )
    moe_per_layer_logging: bool = _expert_flag(
        False, "Log the load of each expert of each layer, which tools/report.py plots."
    )

    @property
    def has_experts(self) -> bool:
        """Whether layers have a mixture of experts; a single expert is an MLP."""
        return self.num_experts > 1

    def layer_has_experts(self, layer_number: int) -> bool:
        """Whether the transformer layer of this number, from 1 on, has a mixture of experts."""
        if isinstance(self.moe_layer_freq, str):
            listed = layer_list(self.moe_layer_freq)
            return self.has_experts and layer_number <= len(listed) and bool(listed[layer_number - 1])
        return self.has_experts and (layer_number - 1) % self.moe_layer_freq == 0


_MOST_LAYERS = 20_000
_LAYER_LIST = re.compile(r"[0-9\[\]()+*,\s]*")
"""Of the numbers of Python only those that are written with the digits 0 to 9."""
_MOST_RUNS = 100
"""Python's parser limits how many terms a sum may have."""


@cache
def layer_list(text: str) -> tuple[int, ...]:
    """Parse a Python list expression of zeros and ones, such as ``([0]+[1])*2``, without evaluating it.

    Raises ValueError if it is not such a list, or longer than any model.
    """
    text = text.strip("\"' ")
    try:
        if not _LAYER_LIST.fullmatch(text):
            raise ValueError
        return tuple(_elements(ast.parse(text, mode="eval").body))
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        expected = "a number from 1 on, or a list of 0 and 1, one for each layer, such as [0]*1+[1]*3"
        raise ValueError(f"must be {expected}") from None


def _elements(node: ast.AST) -> list[int]:
    """The elements of an expression. Raises ValueError if it is not a list, or a list that would take gigabytes."""
    times = 1
    match node:
        case ast.List(elts=elements):
            listed = [(0, 1).index(ast.literal_eval(element)) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            listed = _elements(left) + _elements(right)
        case (
            ast.BinOp(left=factor, op=ast.Mult(), right=ast.Constant(value=int(times)))
            | ast.BinOp(left=ast.Constant(value=int(times)), op=ast.Mult(), right=factor)
        ):
            listed = _elements(factor)
        case _:
            raise ValueError
    if not 0 < len(listed) * times <= _MOST_LAYERS:
        raise ValueError
    return listed * times


def as_runs(listed: Sequence[int]) -> str:
    """The list in the notation of ``--moe-layer-freq``: [0]*1+[1]*3, or [0,1,0] if it has more than 100 runs."""
    runs = [(int(value), len(list(run))) for value, run in groupby(listed)]
    if len(runs) > _MOST_RUNS:
        return f"[{','.join(str(int(value)) for value in listed)}]"
    return "+".join(f"[{value}]*{count}" for value, count in runs)


LORA_TARGETS = {
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "dense": ("o_proj",),
    "dense_h_to_4h": ("gate_proj", "up_proj"),
    "dense_4h_to_h": ("down_proj",),
}
"""Linear layers that can have an adapter, and the names of Llama's projections that each layer contains."""

_adapter_flag = partial(flag, models="gpt", needs="lora_rank")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapters (LoRA)."""

    lora_rank: int = count(
        0,
        "Train only low-rank adapters of this rank (LoRA, arXiv 2106.09685) (default: no adapters).",
        models="gpt",
        excludes={
            "offload_param=nvme": "DeepSpeed would save checkpoints without the frozen weights",
            "optimizer=muon": "it orthogonalizes the update of a full matrix, and A and B are factors of one",
        },
    )
    lora_alpha: float = _adapter_flag(
        16.0, "The output of an adapter is multiplied by this / --lora-rank.", within="(0, inf)"
    )
    lora_dropout: float = _adapter_flag(0.0, "Dropout probability of the input of adapters.", within="[0, 1)")
    lora_target: tuple[str, ...] = _adapter_flag(
        (),
        "Linear layers that have an adapter, by their names or Llama's, such as q_proj (default: all four).",
        metavar="NAME ...",
    )

    @property
    def adapted(self) -> tuple[str, ...]:
        """The linear layers that have an adapter."""
        if not self.lora_rank:
            return ()
        chosen = set(self.lora_target)
        return tuple(name for name, parts in LORA_TARGETS.items() if not chosen or chosen & {name, *parts})
