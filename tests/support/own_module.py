"""The model of examples/pretrain_my_model.py as a module instead of a list of layers, observed by a callback.

Its loss comes with a report.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import pretrain_my_model as example
from torch import nn

from megatron.training.callbacks import Callback
from pretrain_gpt2 import pretrain


def model_provider(run, layout):
    return nn.Sequential(*[layer.build() for layer in example.model_provider(run, layout)])


class Answer(Callback):
    def metrics(self):
        return {"answer": 42}


def forward_step(data_iterator, model):
    loss = example.forward_step(data_iterator, model)
    return loss, {"loss": loss.detach()}


if __name__ == "__main__":
    pretrain(
        model_provider,
        example.train_valid_test_datasets_provider,
        forward_step,
        example.extra_args_provider,
        {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 1, "num_workers": 0}
        | {"batch_size": 8, "global_batch_size": 32, "lr": 3e-3},
        callbacks=[Answer()],
    )
