"""Continue a prompt with the weights of a checkpoint, from whatever layout it was saved on."""

import os
import sys
from typing import Any

import _project_root  # noqa: F401

from megatron.checkpoint.tracker import SavedRun, newest
from megatron.cli import ToolParser
from megatron.config import ActivationConfig, ModelConfig, ParallelConfig
from megatron.errors import ConfigError
from megatron.launch.environment import prepare_environment
from megatron.launch.rank import run_rank


def main() -> None:
    """Read the arguments, find the checkpoint, and only then bring in torch."""
    arguments = _parser().parse_args()
    saved = newest(arguments.load)
    for problem in saved.passed_over:
        print(f"generate.py: warning: {problem}; taking {saved.tag}", file=sys.stderr)
    data = saved.description["config"]["data"]
    if not arguments.prompt:
        raise ConfigError("--prompt is empty: give the text to continue")
    if arguments.temperature <= 0:
        raise ConfigError(
            f"--temperature {arguments.temperature:g} must be above 0; use --greedy for the likeliest token"
        )

    from megatron.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(
        data["tokenizer_type"], arguments.vocab_file or data["vocab_file"], arguments.merge_file or data["merge_file"]
    )
    prepare_environment(os.environ)

    from megatron.checkpoint.weights import whole_model_config
    from megatron.inference.sampling import Sampling, generate
    from megatron.launch.quiet import silence_known_warnings
    from megatron.mpu.layout import distributed

    silence_known_warnings()
    with distributed(ParallelConfig()) as layout:
        config = whole_model_config(saved)
        tokens = tokenizer.tokenize(arguments.prompt)
        new = generate(
            _model(config, layout, saved),
            tokens,
            length=min(len(tokens) + arguments.new_tokens, arguments.out_seq_length),
            context=config.max_position_embeddings,
            eod=tokenizer.eod,
            vocab_size=config.vocab_size,
            sampling=Sampling(
                arguments.greedy, arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed
            ),
        )
        print(tokenizer.detokenize(tokens + list(new)))


def _model(config: ModelConfig, layout: Any, saved: SavedRun) -> Any:
    from deepspeed.accelerator import get_accelerator

    from megatron.checkpoint.weights import load_weights
    from megatron.model.gpt2_model import GPT2Model

    model = GPT2Model(config, ActivationConfig(), layout)
    load_weights(model, saved)
    return model.to(get_accelerator().current_device_name())


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument("--load", required=True, metavar="DIR", help="checkpoint folder")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="tokens to add at most")
    parser.add_argument("--out-seq-length", type=int, default=1024, metavar="N", help="tokens at most, prompt included")
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="below 1 is bolder, above 1 wilder")
    parser.add_argument(
        "--top_k", "--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest; 0 is all"
    )
    parser.add_argument(
        "--top_p",
        "--top-p",
        type=float,
        default=0.0,
        metavar="P",
        help="choose among the likeliest that hold P of the probability; 0 is all",
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="equal seeds give equal texts")
    parser.add_argument("--vocab-file", metavar="FILE", help="vocabulary, if it is no longer where the run found it")
    parser.add_argument("--merge-file", metavar="FILE", help="merges, if they are no longer where the run found them")
    return parser


if __name__ == "__main__":
    run_rank(main)
