"""Train a small model for one step on DeepSpeed and do nothing else, in the style of its tutorials.

deepspeed --num_gpus 2 benchmarks/measures/bare_deepspeed.py
"""

import os

import deepspeed
import torch
from torch import nn

VOCABULARY, LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH = 128, 2, 64, 4, 32, 2


def main() -> None:
    """One step with AdamW, clipped."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    layers = [nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, batch_first=True) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), *layers, nn.Linear(HIDDEN, VOCABULARY))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1))
    logits = engine(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    print(f"rank {os.environ['RANK']}: loss {loss.item():.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
