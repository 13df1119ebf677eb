"""Serve a model over HTTP: a page to try it on, and OpenAI's /v1/completions for programs.

python tools/serve.py --load checkpoints/my
deepspeed --num_gpus 2 tools/serve.py --load checkpoints/my --model-parallel-size 2

Only programs of this machine are answered, unless --host says otherwise. Clients must show a key where --api-key-file
or the variable SERVE_API_KEY has one. SIGTERM and Ctrl-C end the server in order, with 0.
"""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import _project_root  # noqa: F401

from megatron.cli import ToolParser
from megatron.config import ParallelConfig
from megatron.errors import ConfigError
from megatron.inference.source import Source, TokenizerFiles, open_source
from megatron.launch.environment import prepare_environment
from megatron.launch.launcher import rank, world_size
from megatron.launch.rank import run_rank

if TYPE_CHECKING:
    from megatron.serving.app import Service


def main() -> None:
    """See that all is there and the port free; only then bring in torch, load the model and answer."""
    arguments = _parser().parse_args()
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"a server needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    size = arguments.model_parallel_size
    if (started := world_size(os.environ)) != size:
        raise ConfigError(
            f"--model-parallel-size {size} takes as many processes, and {started} were started: "
            f"deepspeed --num_gpus {size} tools/serve.py --model-parallel-size {size} ..."
        )

    from megatron.serving.access import listen, open_listener, read_key

    key = read_key(arguments.api_key_file, os.environ)
    source = open_source(Path(arguments.load), TokenizerFiles(arguments.vocab_file, arguments.merge_file))
    listener = None if rank(os.environ) else open_listener(arguments.host, arguments.port)
    prepare_environment(os.environ)

    from megatron.inference.continuation import LanguageModel
    from megatron.inference.generator import TextGenerator
    from megatron.inference.loading import load_model
    from megatron.launch.quiet import silence_known_warnings
    from megatron.mpu.layout import distributed
    from megatron.serving.app import build_app
    from megatron.serving.desk import Desk
    from megatron.serving.generating import Ranks, completing
    from megatron.serving.server import compute_along, serve

    silence_known_warnings()
    with distributed(ParallelConfig(model_parallel_size=size, world_size=size)) as layout:
        model = LanguageModel(load_model(source, layout, arguments.dtype), source.config, layout.tensor_group)
        complete, ranks = completing(TextGenerator(model, source.tokenizer)), Ranks(layout.tensor_group)
        if listener is None:
            compute_along(complete, ranks)
        else:
            service = _service(arguments, source, key)
            desk = Desk(most_waiting=arguments.max_waiting, seconds=arguments.request_seconds)
            if not (key or service.only_here):
                print(
                    "serve.py: warning: whoever reaches the port may use the model; see --api-key-file", file=sys.stderr
                )
            print(f"{service.model} at {listen(listener)}", flush=True)
            serve(build_app(service, desk), listener, desk, complete, ranks, grace=arguments.grace_seconds)


def _service(arguments: argparse.Namespace, source: Source, key: str | None) -> "Service":
    from megatron.serving.access import is_loopback
    from megatron.serving.app import Service
    from megatron.serving.request import RequestLimits

    context = source.config.max_position_embeddings
    saved = source.found.saved
    path = source.found.path.resolve() if saved is None else saved.folder.resolve() / saved.tag
    return Service(
        model=arguments.model_name or "/".join(path.parts[-1 if saved is None else -2 :]),
        created=int(path.stat().st_mtime),
        tokenizer=source.tokenizer,
        limits=RequestLimits(context, min(arguments.max_tokens, context), arguments.max_choices),
        most_body_bytes=arguments.max_body_bytes,
        api_key=key,
        only_here=is_loopback(arguments.host),
    )


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    add = parser.add_argument
    add("--load", required=True, metavar="PATH", help="checkpoint of any layout, merged weights, Hugging Face folder")
    add("--model-name", metavar="NAME", help="what clients call the model; by default the last of its path")
    add("--vocab-file", metavar="FILE", help="vocabulary, if it is no longer where the run found it")
    add("--merge-file", metavar="FILE", help="merges, if they are no longer where the run found them")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="what to compute in")
    add("--model-parallel-size", type=_whole, default=1, metavar="N", help="processes that share the model")
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is all of this machine's")
    add("--port", type=_port, default=8000, metavar="N", help="port to listen at; 0 is any free one")
    add("--api-key-file", type=Path, metavar="FILE", help="file with the key that clients must show")
    add("--max-tokens", type=_whole, default=1024, metavar="N", help="tokens of a completion at most")
    add("--max-choices", type=_whole, default=8, metavar="N", help="completions of one request at most")
    add("--max-body-bytes", type=_whole, default=2**20, metavar="N", help="size of a request at most")
    add("--max-waiting", type=_whole, default=16, metavar="N", help="requests that may wait behind the one in work")
    add(
        "--request-seconds",
        type=_seconds,
        default=120,
        metavar="S",
        help="time for a request, waiting included",
    )
    add("--grace-seconds", type=_seconds, default=10, metavar="S", help="time to finish in when asked to leave")
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; they go from 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text) if text.replace(".", "", 1).isdecimal() else 0.0
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0 and up to a day")
    return seconds


if __name__ == "__main__":
    run_rank(main)
