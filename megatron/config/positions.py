"""Settings of position embeddings: a learned table, RoPE, or a bias of attention scores by distance."""

from dataclasses import dataclass, fields
from functools import partial

from megatron.config.fields import flag

ROTARY = ("rope", "yarn")
"""Kinds of positions that rotate queries and keys."""
LOW_FREQUENCY_FACTOR = 1.0
HIGH_FREQUENCY_FACTOR = 4.0
ORIGINAL_LENGTH = 8192
"""Constants of Llama 3.1's RoPE scaling: pretraining length, and the band between short and long wavelengths."""

_yarn_flag = partial(flag, models="gpt", needs="position_embedding_type=yarn")
_rotary_flag = partial(flag, models="gpt", needs="position_embedding_type=rope|yarn")
_relative_flag = partial(flag, models="t5", needs="position_embedding_type=relative")


@dataclass(frozen=True, kw_only=True)
class PositionConfig:
    """Position embeddings."""

    position_embedding_type: str = flag(
        "learned_absolute",
        "How positions are represented: a learned table, RoPE (arXiv 2104.09864), RoPE extended by YaRN (arXiv "
        "2309.00071), a bias of the scores by distance (relative, of T5 only), or not at all.",
        choices=("learned_absolute", "rope", "yarn", "relative", "none"),
        switches={"use-rotary-position-embeddings": "rope", "no-position-embedding": "none"},
        models="gpt t5",
        needs=("yarn: yarn_rotary_scaling_factor", "yarn: yarn_original_max_position_embeddings"),
    )
    relative_attention_num_buckets: int = _relative_flag(32, "Number of buckets of distances.", within="[4, 1048576]")
    relative_attention_max_distance: int = _relative_flag(
        128, "Distance in tokens from which on all share the last bucket.", within="[2, 1073741824]"
    )
    rotary_base: float = _rotary_flag(
        10000.0, "Base of the rotation's wavelengths.", aliases=("rotary-position-embeddings-theta",), within="(0, inf)"
    )
    rotary_percent: float = _rotary_flag(1.0, "Share of each head's dimensions that is rotated.", within="(0, 1]")
    use_rope_scaling: bool = _rotary_flag(
        False, "Scale the long wavelengths of RoPE by Llama 3.1's rule.", excludes=("position_embedding_type=yarn",)
    )
    rope_scaling_factor: float = flag(
        8.0, "Factor of --use-rope-scaling.", within="[1, inf)", models="gpt", needs="use_rope_scaling"
    )
    rotary_seq_len_interpolation_factor: float = _rotary_flag(
        1.0,
        "Divide positions by this factor before the rotation: linear interpolation (arXiv 2306.15595).",
        within="[1, inf)",
        excludes=("position_embedding_type=yarn", "use_rope_scaling"),
    )
    yarn_rotary_scaling_factor: float | None = _yarn_flag(
        None, "Factor by which YaRN extends --yarn-original-max-position-embeddings.", within="[1, inf)"
    )
    yarn_original_max_position_embeddings: int = _yarn_flag(
        0, "Sequence length that the model was trained with before YaRN.", within="[1, inf)"
    )
    yarn_beta_fast: float = _yarn_flag(
        32.0, "Dimensions with more rotations than this in the original length are not scaled.", within="(0, inf)"
    )
    yarn_beta_slow: float = _yarn_flag(
        1.0, "Dimensions with fewer rotations than this in the original length are fully scaled.", within="(0, inf)"
    )
    yarn_mscale: float = _yarn_flag(
        1.0,
        "Scale queries and keys by 0.1 x this x ln(factor) + 1, divided by the same for --yarn-mscale-all-dim.",
        within="[0, inf)",
    )
    yarn_mscale_all_dim: float = _yarn_flag(0.0, "See --yarn-mscale.", within="[0, inf)")
    yarn_correction_range_round_to_int: bool = _yarn_flag(
        True, "Round the dimensions of --yarn-beta-fast and --yarn-beta-slow to integers; enabled by default."
    )
    max_position_embeddings: int = flag(
        0, "Longest sequence, and rows of a table of positions (default: --seq-length).", within="[1, 1073741824]"
    )

    @property
    def has_rotary_embedding(self) -> bool:
        """Whether attention rotates queries and keys by their positions."""
        return self.position_embedding_type in ROTARY

    @property
    def position_weights(self) -> str:
        """``position_embedding_type`` of the checkpoint's weights: ``rope`` for YaRN, which has the same weights."""
        return "rope" if self.has_rotary_embedding else self.position_embedding_type

    @property
    def has_position_table(self) -> bool:
        """Whether positions are embedded by a learned table."""
        return self.position_embedding_type == "learned_absolute"

    @property
    def has_relative_positions(self) -> bool:
        """Whether the scores of attention have a bias by distance."""
        return self.position_embedding_type == "relative"

    @property
    def position_rows(self) -> int:
        """Rows of the learned table of positions; 0 without one."""
        return self.max_position_embeddings if self.has_position_table else 0


ROTATION = tuple(
    field.name for field in fields(PositionConfig) if field.name.startswith(("rotary_", "use_rope_", "rope_", "yarn_"))
)
"""Fields that determine the rotation angles of queries and keys."""
