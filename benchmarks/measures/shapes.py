"""Sizes of the models that are measured, and the settings of their steps. No torch here."""

from dataclasses import dataclass

CLIP, LEARNING_RATE, WEIGHT_DECAY = 1.0, 1e-4, 0.01
STEPS = 5
"""Of each way in a round, on a GPU."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its batch."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    vocabulary: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence

    @property
    def parameters(self) -> int:
        """Of the model, with the embedding tied to the head."""
        per_layer = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * per_layer + (self.vocabulary + self.sequence + 2) * self.hidden

    @property
    def words(self) -> list[str]:
        """Flags of ``pretrain_gpt2.py``: the model and its micro-batch, without dropout, and the optimizer."""
        return (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads}"
            f" --seq-length {self.sequence} --batch-size {self.batch}"
            f" --lr {LEARNING_RATE} --lr-decay-style constant --warmup 0 --clip-grad {CLIP}"
            f" --weight-decay {WEIGHT_DECAY} --attention-dropout 0 --hidden-dropout 0"
        ).split()

    @property
    def flops(self) -> float:
        """Of a step, attention in full (arXiv 2205.05198, appendix A)."""
        per_layer = 72 * self.hidden**2 * (1 + self.sequence / (6 * self.hidden))
        return self.tokens * (self.layers * per_layer + 6 * self.hidden * self.vocabulary)

    def __str__(self) -> str:
        return f"{self.layers} layers, h {self.hidden}, s {self.sequence}, b {self.batch}, v {self.vocabulary}"


SHAPES = {
    "A": Shape(layers=6, hidden=384, heads=6, sequence=256, batch=4, vocabulary=512),
    "B": Shape(layers=4, hidden=256, heads=4, sequence=128, batch=8, vocabulary=50304),
    "C": Shape(layers=2, hidden=768, heads=12, sequence=512, batch=1, vocabulary=50304),
}
