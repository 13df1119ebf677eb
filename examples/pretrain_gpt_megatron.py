"""A program in the shape of Megatron-LM's pretrain_gpt.py: functions for model, data and loss, and get_args().

    torchrun --nproc_per_node 4 examples/pretrain_gpt_megatron.py --model-parallel-size 2 --pipe-parallel-size 2 \\
        --data-path my-gpt2_text_document --vocab-rows 50304 ...

Its model is a small GPT without dropout, of the layers of megatron.mpu.
"""

import math
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.nn import functional as F

from megatron import get_args, get_timers, mpu, print_rank_0
from megatron.data.gpt_dataset import build_train_valid_test_datasets
from megatron.enums import ModelType
from megatron.training import pretrain


def normal(seed):
    """An init_method whose weights follow from the seed, so that they are the same on every layout."""

    def init(weight):
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        return weight.data.copy_(0.02 * drawn)

    return init


class Block(nn.Module):
    """Causal attention and MLP: [b, s, h] -> [b, s, h]."""

    def __init__(self, number):
        super().__init__()
        args = get_args()
        h, seed = args.hidden_size, args.seed + 10 * number
        self.heads = args.num_attention_heads // mpu.get_tensor_model_parallel_world_size()
        column = partial(mpu.ColumnParallelLinear, gather_output=False)
        row = partial(mpu.RowParallelLinear, input_is_parallel=True)
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv = column(h, 3 * h, init_method=normal(seed), stride=3)
        self.out = row(h, h, init_method=normal(seed + 1))
        self.up = column(h, 4 * h, init_method=normal(seed + 2))
        self.down = row(4 * h, h, init_method=normal(seed + 3))

    def forward(self, x):
        b, s, _ = x.shape
        qkv, _ = self.qkv(self.norm_1(x))
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, -1))[0]
        return x + self.down(F.gelu(self.up(self.norm_2(x))[0]))[0]


class GPT(nn.Module):
    """One stage of a GPT, or all of it."""

    def __init__(self, pre_process, post_process):
        super().__init__()
        args = get_args()
        h, stages = args.hidden_size, mpu.get_pipeline_model_parallel_world_size()
        layers = args.num_layers // stages
        first = layers * mpu.get_pipeline_model_parallel_rank()
        self.pre_process, self.post_process, self.received = pre_process, post_process, None
        if pre_process:
            self.words = mpu.VocabParallelEmbedding(args.vocab_rows, h, init_method=normal(args.seed + 1))
            self.positions = nn.Parameter(normal(args.seed + 2)(torch.empty(args.seq_length, h)))
        self.blocks = nn.ModuleList(Block(first + number) for number in range(1, layers + 1))
        if post_process:
            self.norm = nn.LayerNorm(h)
            self.head = mpu.ColumnParallelLinear(
                h, args.vocab_rows, bias=False, gather_output=False, init_method=normal(args.seed + 3)
            )

    def set_input_tensor(self, hidden):
        """The output of the stage before."""
        self.received = hidden

    def forward(self, tokens, labels):
        """The loss of each token [b, s] on the last stage, otherwise hidden states [b, s, h]."""
        if self.pre_process:
            x = self.words(tokens) + self.positions
        else:
            x = self.received
        for block in self.blocks:
            x = block(x)
        if not self.post_process:
            return x
        logits, _ = self.head(self.norm(x))
        return mpu.vocab_parallel_cross_entropy(logits.float(), labels)


def model_provider(pre_process=True, post_process=True):
    """The layers of this stage."""
    print_rank_0("building GPT model ...")
    return GPT(pre_process, post_process)


def get_batch(data_iterator):
    """Tokens and labels [b, s]."""
    text = mpu.broadcast_data(["text"], next(data_iterator), torch.int64)["text"]
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss_func(loss_mask, losses):
    """The mean loss of a micro-batch, and what Megatron-LM logs of it."""
    loss = (losses.float() * loss_mask).sum() / loss_mask.sum()
    return loss, {"lm loss": loss.detach()}


def forward_step(data_iterator, model):
    """The output of the model, and the function that makes a loss of it."""
    timers = get_timers()
    timers("batch-generator").start()
    tokens, labels = get_batch(data_iterator)
    timers("batch-generator").stop()
    return model(tokens, labels), partial(loss_func, torch.ones_like(labels, dtype=torch.float32))


def train_valid_test_datasets_provider(train_val_test_num_samples):
    """Data sets for training, validation and test, which need that many samples."""
    args = get_args()
    print_rank_0(f"> data sets of GPT; untrained, the loss is about {math.log(args.vocab_rows):.2f}")
    return build_train_valid_test_datasets(
        data_prefix=args.data_path,
        data_impl=args.data_impl,
        splits_string=args.split,
        train_valid_test_num_samples=train_val_test_num_samples,
        seq_length=args.seq_length,
        seed=args.seed,
        skip_warmup=not args.mmap_warmup,
    )


def add_flags(parser):
    """Flags of this program."""
    parser.add_argument("--vocab-rows", type=int, default=50304, help="rows of the word embedding")
    return parser


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_flags,
        args_defaults={"num_workers": 0},
    )
