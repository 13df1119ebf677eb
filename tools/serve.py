"""Serve a model over HTTP: a page to try it on, and OpenAI's completions and chat completions for programs.

    python tools/serve.py --load checkpoints/my
    deepspeed --log_level critical --num_gpus 2 tools/serve.py --load checkpoints/my

The model is a checkpoint of any layout, merged weights or a Hugging Face folder. Messages to a vision-language model
may hold images as data URLs; nothing is fetched. Only this machine can connect, unless --host names another address. If
--api-key-file or the variable SERVE_API_KEY holds a key, clients must send it. SIGTERM and Ctrl-C shut the server down
cleanly. In names of flags, hyphens and underscores are the same.
"""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import _project_root  # noqa: F401

from megatron.common.environment import rank
from megatron.common.errors import ConfigError
from megatron.launch.environment import prepare_environment
from megatron.launch.rank import run_rank
from megatron.model.architectures import GPT2, LLAVA
from megatron.tools.command_line import ToolParser, check_values
from megatron.tools.inference.model_flags import add_chat_template_flag, add_model_flags, shared_source
from megatron.tools.inference.source import Source

if TYPE_CHECKING:
    from megatron.tools.serving.server import Service

INTERVALS = {
    "port": "[0, 65535]",
    "max_tokens": "[1, inf)",
    "max_choices": "[1, inf)",
    "max_batch_size": "[1, inf)",
    "max_waiting": "[0, inf)",
    "max_body_bytes": "[1, inf)",
    "request_seconds": "(0, 86400]",
    "grace_seconds": "[0, 3600]",
}
_BODY, _BODY_WITH_IMAGES = 2**20, 2**24


def main() -> None:
    """Check arguments, files and port before torch is imported; then load the model and serve it."""
    args = _parser().parse_args()
    check_values(args, INTERVALS)
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the server needs packages that are not installed: pip install {' '.join(missing)}")

    from megatron.tools.serving.access import is_loopback, listen, read_key, url_of

    key = read_key(args.api_key_file, os.environ)
    source, ranks = shared_source(args, os.environ, (GPT2, LLAVA))
    listener = None if rank(os.environ) else listen(args.host, args.port)
    prepare_environment(os.environ)

    import torch

    from megatron.tools.inference.model import opened_model
    from megatron.tools.serving.scheduler import RankBroadcast, RequestBatch, RequestQueue
    from megatron.tools.serving.server import build_app, serve, serve_worker

    threads = torch.get_num_threads()
    if listener is not None:
        # Another thread generates, and has OpenMP threads of its own. With the threads of this one there would be two
        # for each core, and GNU's OpenMP would let them sleep after each operator, which doubles the time of a token.
        torch.set_num_threads(1)
    with opened_model(source, ranks, args.dtype) as model:
        batch = RequestBatch(model, source.tokenizer, args.max_batch_size)
        rank_broadcast = RankBroadcast(model.tensor_group)
        if listener is None:
            serve_worker(batch, rank_broadcast)
            return
        service = _service(args, source, key, local_only=is_loopback(listener.getsockname()[0]))
        queue = RequestQueue(
            most_waiting=args.max_waiting, seconds=args.request_seconds, most_running=args.max_batch_size
        )
        if not (key or service.local_only):
            print(
                "serve.py: warning: everyone who can reach the port can use the model: see --api-key-file",
                file=sys.stderr,
            )
        ready = f"{service.model} at {url_of(listener)}"
        app = build_app(service, queue)
        serve(app, listener, queue, batch, rank_broadcast, grace=args.grace_seconds, threads=threads, ready=ready)


def _service(args: argparse.Namespace, source: Source, key: str | None, *, local_only: bool) -> "Service":
    from megatron.tools.chat.files import template_of_model
    from megatron.tools.chat.template import ChatPrompts
    from megatron.tools.serving.protocol import RequestLimits
    from megatron.tools.serving.server import Service

    context, reads_images = source.config.max_position_embeddings, bool(source.config.vision_num_layers)
    path = Path(source.name).resolve()
    chat = None
    try:
        chat = ChatPrompts(template_of_model(source.found, source.tokenizer, args.chat_template), source.tokenizer)
    except ConfigError as error:
        if args.chat_template is not None:
            raise
        print(f"serve.py: warning: no /v1/chat/completions: {error}", file=sys.stderr)
    return Service(
        model=args.model_name or "/".join(path.parts[-2 if source.found.saved else -1 :]),
        created=int(path.stat().st_mtime),
        tokenizer=source.tokenizer,
        limits=RequestLimits(
            context, min(args.max_tokens, context), args.max_choices, source.config if reads_images else None
        ),
        chat=chat,
        most_body_bytes=args.max_body_bytes or (_BODY_WITH_IMAGES if reads_images else _BODY),
        api_key=key,
        local_only=local_only,
    )


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    add_model_flags(parser)
    add_chat_template_flag(parser)
    who = parser.add_argument_group("access").add_argument
    who("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every address of this machine")
    who("--port", type=int, default=8000, metavar="N", help="port to listen on; 0 is any free one")
    who("--api-key-file", type=Path, metavar="FILE", help="file with the API key that clients must send")
    who("--model-name", metavar="NAME", help="name of the model in the API (default: the end of its path)")
    most = parser.add_argument_group("limits").add_argument
    most("--max-tokens", type=int, default=1024, metavar="N", help="maximum tokens of a completion")
    most("--max-choices", type=int, default=8, metavar="N", help="maximum completions of one request")
    most("--max-batch-size", type=int, default=8, metavar="N", help="maximum completions that are generated together")
    most("--max-waiting", type=int, default=16, metavar="N", help="maximum requests that wait for others to finish")
    most(
        "--max-body-bytes",
        type=int,
        metavar="N",
        help="maximum size of a request (default: 1 MiB, or 16 MiB for a model that reads images)",
    )
    most(
        "--request-seconds", type=float, default=120.0, metavar="S", help="time limit of a request, including its wait"
    )
    most(
        "--grace-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="time to finish open requests after SIGTERM or Ctrl-C",
    )
    return parser


if __name__ == "__main__":
    run_rank(main)
