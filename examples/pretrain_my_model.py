"""Train a model of one's own with the training loop of this suite: layers that fit points of a curve.

    torchrun --nproc_per_node 4 examples/pretrain_my_model.py --model-parallel-size 2 --zero-stage 1
    torchrun --nproc_per_node 4 examples/pretrain_my_model.py --model-parallel-size 2 --pipe-parallel-size 2

All flags of pretrain_gpt2.py are there: precision, ZeRO, checkpoints, metrics and so on; see docs/adding-a-model.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.nn import functional as F

from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, WeightInit
from pretrain_gpt2 import pretrain


class Block(nn.Module):
    """x + MLP(x) with tensor-parallel layers: [b, h] -> [b, h]. The first block also widens its input, [b, 1]."""

    def __init__(self, run, layout, number):
        super().__init__()
        h, group = run.model.hidden_size, layout.tensor_group

        def init(name):  # equal on every layout, since it follows from seed and name
            return WeightInit(std=run.extra_args["std"], seed=run.train.seed, name=f"{number}.{name}")

        self.widen = nn.Parameter(init("widen").draw((1, h))) if number == 0 else None
        self.up = ColumnParallelLinear(h, 4 * h, group=group, init=init("up"))
        self.down = RowParallelLinear(4 * h, h, group=group, init=init("down"))

    def forward(self, x):
        if self.widen is not None:
            x = x.to(self.widen.dtype) @ self.widen  # with --bf16 the weights are in bf16, and the data are not
        return x + self.down(F.gelu(self.up(x)))


class Curve(torch.utils.data.Dataset):
    """Points of a sine: the input [1] and the target [1]."""

    def __init__(self, points):
        self.points = points

    def __len__(self):
        return self.points

    def __getitem__(self, index):
        x = torch.rand(1, generator=torch.Generator().manual_seed(index)) * 6 - 3
        return x, x.sin()


def model_provider(run, layout):
    """A list of layers, which a pipeline can divide. Without --pipe-parallel-size a module would do."""
    return [LayerSpec(Block, run, layout, number) for number in range(run.model.num_layers)]


def train_valid_test_datasets_provider(run, samples):
    """Data sets for training, validation and test, which need that many samples."""
    training, validation, _ = samples
    return Curve(training), Curve(validation), None


def forward_step(data_iterator, model):
    """The mean loss of a micro-batch."""
    x, y = next(data_iterator)
    return F.mse_loss(model(x).mean(-1, keepdim=True).float(), y)


def extra_args_provider(parser):
    """Flags of this model."""
    parser.add_argument("--std", type=float, default=0.1, help="deviation of the initial weights")


if __name__ == "__main__":
    pretrain(
        model_provider,
        train_valid_test_datasets_provider,
        forward_step,
        extra_args_provider=extra_args_provider,
        args_defaults={
            **{"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 1, "num_workers": 0},
            **{"batch_size": 8, "global_batch_size": 32, "train_iters": 20, "lr": 3e-3, "log_interval": 5},
        },
    )
