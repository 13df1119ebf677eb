"""Low-rank adapters, which fine-tuning can train in place of the weights (LoRA)."""

from dataclasses import dataclass
from functools import partial

from megatron.config.fields import flag

LORA_TARGETS = {
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "dense": ("o_proj",),
    "dense_h_to_4h": ("gate_proj", "up_proj"),
    "dense_4h_to_h": ("down_proj",),
}
"""Linear layers that can have an adapter, and the matrices of Llama's that each of them holds."""

_adapter_flag = partial(flag, masked_lm=False, needs="lora_rank")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapters (LoRA)."""

    lora_rank: int = flag(
        0,
        "Train only low-rank adapters of this rank (LoRA, arXiv 2106.09685); all other weights are frozen "
        "(default: no adapters).",
        within="[1, inf)",
        masked_lm=False,
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
        "Linear layers that have an adapter: query_key_value, dense, dense_h_to_4h, dense_4h_to_h, or the names of the "
        "same matrices in models of the Llama family, such as q_proj k_proj v_proj (default: all four).",
        metavar="NAME ...",
    )

    @property
    def adapted(self) -> tuple[str, ...]:
        """The linear layers that have an adapter."""
        if not self.lora_rank:
            return ()
        chosen = set(self.lora_target)
        return tuple(name for name, parts in LORA_TARGETS.items() if not chosen or chosen & {name, *parts})
