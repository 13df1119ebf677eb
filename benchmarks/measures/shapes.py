"""Sizes of the models that are measured, and the settings of their steps. No torch here."""

from dataclasses import dataclass

CLIP, LEARNING_RATE, WEIGHT_DECAY = 1.0, 1e-4, 0.01


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


@dataclass(frozen=True)
class LlamaShape(Shape):
    """The same of a Llama: its query groups, and the size inside its MLP."""

    groups: int
    ffn: int

    @property
    def words(self) -> list[str]:
        """Flags of ``pretrain_gpt2.py``."""
        return [
            *super().words,
            *f"--num-query-groups {self.groups} --ffn-hidden-size {self.ffn} --swiglu --normalization RMSNorm".split(),
            *"--position-embedding-type rope --disable-bias-linear".split(),
        ]

    @property
    def parameters(self) -> int:
        """Of the model, with the embedding tied to the head."""
        attention = 2 * self.hidden**2 + 2 * self.hidden**2 * self.groups // self.heads
        per_layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * per_layer + (self.vocabulary + 1) * self.hidden

    @property
    def flops(self) -> float:
        """Of a step, attention in full."""
        scores = 12 * self.layers * self.sequence * self.hidden
        return self.tokens * (6 * self.parameters + scores)

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.groups} groups, ffn {self.ffn}"


LLAMA_SHAPES = {
    "A": LlamaShape(layers=6, hidden=384, heads=6, sequence=256, batch=4, vocabulary=512, groups=2, ffn=1024),
    "C": LlamaShape(layers=2, hidden=768, heads=12, sequence=512, batch=1, vocabulary=50304, groups=4, ffn=2048),
}
