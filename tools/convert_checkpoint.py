"""Convert checkpoints to and from other formats.

    python tools/convert_checkpoint.py merge checkpoints/my --output my.safetensors
    python tools/convert_checkpoint.py to-hf checkpoints/my --output my-hf
    python tools/convert_checkpoint.py from-hf gpt2 --output checkpoints/gpt2
    python tools/convert_checkpoint.py join-llava clip-vit-large-patch14-336 llama-2-7b --output llava-hf
    python tools/convert_checkpoint.py from-megatron old/global_step1000 --output checkpoints/old
    python tools/convert_checkpoint.py to-universal checkpoints/my
    python tools/convert_checkpoint.py reshard checkpoints/my --model-parallel-size 2 --pipe-parallel-size 2

Nothing is overwritten, and a conversion that fails leaves no output.
"""

import argparse
import inspect
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import _project_root  # noqa: F401
from _conversion import (
    check_output,
    find_source,
    max_shard_size,
    model_flags,
    new_output,
    paths,
    report,
    shard_size,
    sole_writer,
    tokenizer_flags,
    write_checkpoint,
)

from megatron.checkpoint.files import SAVE_ADVICE, replace_text
from megatron.checkpoint.folder_lock import check_unlocked
from megatron.checkpoint.run_file import RUN_FILE
from megatron.checkpoint.tracker import newest, tag_at
from megatron.common.errors import CheckpointError, ConfigError, LaunchError, ResourceError
from megatron.common.files import signals_raised
from megatron.common.output_paths import file_problem
from megatron.common.tokenizer_files import GPT2_BPE, tokenizer_files
from megatron.launch.rank import run_rank
from megatron.tools.command_line import ToolParser, check_values, print_warnings, run_tool


@dataclass(frozen=True)
class Command:
    """A sub-command. The docstring of ``run`` is its help."""

    add_flags: Callable[[argparse.ArgumentParser], Any]
    run: Callable[[argparse.Namespace], None]


def main() -> None:
    """Parse the arguments, and run the sub-command."""
    parser = _parser()
    args, args.run_flags = parser.parse_known_args()
    if args.command != "reshard":
        parser.refuse(args.run_flags)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    COMMANDS[args.command].run(args)


def _merge(args: argparse.Namespace) -> None:
    """Merge the weights of a checkpoint of any layout into one safetensors file, or a folder of them.

    They keep their type and the names they have without a pipeline. The header of each file has run.json.
    """
    is_file = args.output.suffix == ".safetensors"
    if is_file and args.max_shard_size:
        raise ConfigError(f"--max-shard-size is for a folder, and --output {args.output} is one file: leave it out")
    size = shard_size(args)
    found = find_source(args, "tag", "folder", "universal")

    from megatron.tools.convert.full_model import write_tensors
    from megatron.tools.convert.load_and_save import read_model, run_metadata

    model = read_model(found)
    with new_output(args) as output:
        write_tensors(model.weights, output, max_shard_size=None if is_file else size, metadata=run_metadata(model))
    report(args, model)


def _merge_flags(parser: argparse.ArgumentParser) -> None:
    paths(parser, "a checkpoint folder or one tag of it", "a name that ends in .safetensors, or a folder")
    max_shard_size(parser)


def _to_hf(args: argparse.Namespace) -> None:
    """Write a folder for Hugging Face's transformers, from a checkpoint of any model but one of your own.

    Weights keep their type. The rows that pad the vocabulary are removed. Files of the tokenizer are copied from the
    Hugging Face folder that the model came from, if it did. BERT becomes a Megatron-BERT, and with a classifier as its
    head one for sequence classification. With --merge-lora adapters are added to the weights.
    """
    size = shard_size(args)
    found = find_source(args, "tag", "folder", "universal", "safetensors")

    from megatron.tools.convert.huggingface_files import files_for_huggingface
    from megatron.tools.convert.load_and_save import read_model, write_huggingface
    from megatron.tools.convert.lora import check_adapters, merge_adapters
    from megatron.tools.convert.vocabulary import TOKENIZERS, read_run_tokenizer

    model = read_model(found)
    if args.merge_lora:
        check_adapters(model, args.path)
        model = merge_adapters(model, args.path)
    assert model.description is not None, "a checkpoint of this suite"
    if model.config.lora_rank:
        raise ConfigError(f"{args.path} has adapters: add --merge-lora, or write only them with to-peft")
    tokenizer = read_run_tokenizer(model.description, model.config, args.vocab_file, args.merge_file)
    folder = found.saved.folder if found.saved else None
    carried = files_for_huggingface(folder, model.description, model.config, tokenizer)
    with new_output(args) as folder:
        write_huggingface(folder, model, tokenizer, max_shard_size=size, carried=carried)
    report(args, model)
    if tokenizer is None and carried.keys().isdisjoint(TOKENIZERS):
        print("  no tokenizer files: copy them into the folder, or give --vocab-file and --merge-file of a BPE")


def _to_hf_flags(parser: argparse.ArgumentParser) -> None:
    paths(parser, "a checkpoint folder, one tag of it, or merged weights", "folder to write")
    parser.add_argument("--merge-lora", action="store_true", help="add adapters to the weights of their layers")
    tokenizer_flags(parser, "if it has moved since the run")
    max_shard_size(parser)


def _from_hf(args: argparse.Namespace) -> None:
    """Write a checkpoint with the weights of a Hugging Face folder, for pretrain_gpt2.py --load FOLDER --finetune.

    The model is a GPT-2, Llama, Mistral, Qwen2 or Qwen3, a Megatron-BERT for pretrain_bert.py, or a T5 1.1 for
    pretrain_t5.py. The folder has config.json and model.safetensors or pytorch_model.bin, whole or with an index. The
    files of its tokenizer are copied, also as vocab.json and merges.txt for a GPT-2 and as vocab.txt for a BERT.
    Weights keep their type.
    """
    found = find_source(args, "huggingface")

    from megatron.model.huggingface import read_config
    from megatron.tools.convert.huggingface_files import carried_files
    from megatron.tools.convert.vocabulary import TOKENIZERS, count_tokens, read_folder_tokenizer

    tokenizer = read_folder_tokenizer(found.path, read_config(found.path))
    tokens = len(tokenizer.tokens) if tokenizer is not None else count_tokens(found.path)
    read_config(found.path, vocab_size=tokens)  # refuses a vocabulary that is larger than the model's

    from megatron.tools.convert.load_and_save import read_huggingface

    model, carried = read_huggingface(found.path, vocab_size=tokens), carried_files(found.path)
    write_checkpoint(args, model, tokenizer, source=found.path, carried=carried)
    report(args, model)
    if tokenizer is None and carried.keys().isdisjoint(TOKENIZERS):
        print("  no tokenizer that fits was found: give the run --vocab-file and --merge-file")


def _from_hf_flags(parser: argparse.ArgumentParser) -> None:
    paths(parser, "a Hugging Face folder", "checkpoint folder to write")


def _join_llava(args: argparse.Namespace) -> None:
    """Write a Hugging Face folder of a LLaVA, from folders of an encoder of images and a language model.

    The encoder is a CLIP or SigLIP, the language model one of the Llama family, and the projector between them is new.
    pretrain_vlm.py --load-hf FOLDER trains it. If the vocabulary has no row for the placeholder, it gets more.
    """
    check_output(args)
    check_values(args, {"image_token_id": "[0, inf)"})

    from megatron.model.huggingface import HF_CONFIG
    from megatron.model.huggingface.llava import PROCESSORS
    from megatron.tools.convert.huggingface_files import carried_files
    from megatron.tools.convert.join_llava import joined_llava
    from megatron.tools.convert.load_and_save import write_huggingface

    model = joined_llava(args.path, args.language_model, args.image_token_id, args.vision_feature_layer, args.seed)
    carried = {name: file for name, file in carried_files(args.language_model).items() if name != HF_CONFIG}
    carried |= {name: file for name, file in carried_files(args.path).items() if name == PROCESSORS[0]}
    with new_output(args) as folder:
        write_huggingface(folder, model, None, max_shard_size=shard_size(args), carried=carried)
    report(args, model)


def _join_llava_flags(parser: argparse.ArgumentParser) -> None:
    paths(parser, "a Hugging Face folder of a CLIP or SigLIP", "folder to write")
    add = parser.add_argument
    add("language_model", type=Path, metavar="LANGUAGE", help="a Hugging Face folder of the Llama family")
    add("--image-token-id", type=int, required=True, metavar="N", help="the placeholder of images")
    add(
        "--vision-feature-layer", type=int, default=-2, metavar="N", help="layer that the projector reads (default: -2)"
    )
    add("--seed", type=int, default=1234, metavar="N", help="of the projector's weights (default: 1234)")
    max_shard_size(parser)


def _from_megatron(args: argparse.Namespace) -> None:
    """Write a checkpoint with weights that another Megatron saved, for pretrain_gpt2.py --load FOLDER --finetune.

    The model is a GPT, or one of the Llama family. It reads torch_dist folders (megatron-core),
    mp_rank_XX/model_optim_rng.pt (Megatron-LM), mp_rank_XX_model_states.pt and layer_LL-model_XX-model_states.pt
    (Megatron on DeepSpeed), and merges tensor-parallel shards and pipeline stages. Properties of the model that the
    files lack must be given as flags. Nothing but the weights is taken over.
    """
    check_output(args)
    counts = ("vocab_size", "num_attention_heads", "max_position_embeddings")
    check_values(
        args, {**dict.fromkeys(counts, "[1, inf)"), "layernorm_epsilon": "(0, inf)", "rotary_base": "(0, inf)"}
    )

    from megatron.tokenizer.base import EOD
    from megatron.tools.convert.vocabulary import read_bpe

    has_tokenizer = args.vocab_file or args.merge_file
    files = tokenizer_files(GPT2_BPE, args.vocab_file, args.merge_file, None)
    bpe = read_bpe(*files) if has_tokenizer else None

    from megatron.tools.convert.from_megatron import GivenModel, full_model
    from megatron.tools.convert.megatron_files import read_shards

    shards = read_shards(args.path)
    given = GivenModel(
        heads=args.num_attention_heads,
        vocab_size=len(bpe.tokens) if bpe else args.vocab_size,
        eod_token=bpe.tokens[EOD] if bpe else None,
        version=args.checkpoint_version,
        openai_gelu=args.openai_gelu,
        layernorm_epsilon=args.layernorm_epsilon,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        max_position_embeddings=args.max_position_embeddings,
    )
    model = full_model(shards, given)
    write_checkpoint(args, model, bpe)
    report(args, model)
    version = shards.version if given.version is None else given.version
    print(f"  query_key_value read as of checkpoint version {version:g}")
    print("  not taken over: optimizer, learning rate, iteration, position in the data, random states")


def _from_megatron_flags(parser: argparse.ArgumentParser) -> None:
    paths(parser, "folder with a tracker file, or the folder that holds the files", "checkpoint folder to write")
    tokenizer_flags(parser, "copied to the output; decides the vocabulary's size")
    model_flags(parser)


def _merge_lora(args: argparse.Namespace) -> None:
    """Write a checkpoint without adapters, each added to the weight of its layer, from one of --lora-rank.

    pretrain_gpt2.py --load FOLDER --finetune continues from it; the other tools read it as any checkpoint.
    """
    found = find_source(args, "tag", "folder", "universal")

    from megatron.tools.convert.load_and_save import read_model, write_checkpoint
    from megatron.tools.convert.lora import check_adapters, merge_adapters

    check_adapters(adapted := read_model(found), args.path)
    model = merge_adapters(adapted, args.path)
    assert model.description is not None, "a checkpoint of this suite"
    data, source = (model.description["config"][section] for section in ("data", "checkpoint"))
    files = {name: data.get(name) and Path(data[name]) for name in ("vocab_file", "merge_file")}
    files["source"] = source.get("load_hf") and Path(source["load_hf"])
    with new_output(args) as folder:
        folder.mkdir()
        kept = {"tokenizer_type": data["tokenizer_type"], "chat_template": data.get("chat_template", "")}
        write_checkpoint(folder, model, **files, **kept)
    report(args, model)


def _merge_lora_flags(parser: argparse.ArgumentParser) -> None:
    paths(parser, "a checkpoint folder, one tag of it, or its universal form", "checkpoint folder to write")


def _to_peft(args: argparse.Namespace) -> None:
    """Write the adapters of a model of the Llama family as a folder for PeftModel.from_pretrained.

    It has adapter_config.json and adapter_model.safetensors. The base model is written by to-hf from the checkpoint
    that the training began with.
    """
    found = find_source(args, "tag", "folder", "universal")

    from megatron.tools.convert.load_and_save import read_model
    from megatron.tools.convert.lora import check_adapters, write_peft

    check_adapters(model := read_model(found), args.path)
    with new_output(args) as folder:
        write_peft(folder, model, args.base)
    print(f"{args.output}: adapters of rank {model.config.lora_rank} from {args.path}")


def _to_peft_flags(parser: argparse.ArgumentParser) -> None:
    paths(parser, "a checkpoint folder, one tag of it, or its universal form", "folder to write")
    parser.add_argument("--base", metavar="NAME", help="name or folder of the base model, for adapter_config.json")


def _to_universal(args: argparse.Namespace) -> None:
    """Write the universal form of a checkpoint next to it, as TAG_universal: every parameter whole, in its own files.

    DeepSpeed reads it with "load_universal". pretrain_gpt2.py needs none: it loads a checkpoint on any layout.
    """
    saved = tag_at(args.path) if (args.path / RUN_FILE).exists() else newest(args.path)
    print_warnings(saved.warnings)
    check_unlocked(saved.folder)
    if problem := file_problem("latest_universal", str(saved.folder / "latest_universal")):
        raise CheckpointError(problem)

    from megatron.tools.convert.universal import cached_universal

    with sole_writer(saved.folder):
        folder, is_new = cached_universal(saved)
        replace_text(saved.folder / "latest_universal", folder.name)  # where DeepSpeed looks without a tag
    print(f"{folder}: {'converted from' if is_new else 'exists already, of'} {saved.path}")


def _to_universal_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint folder or one tag of it")


_RESHARDS = "MEGATRON_RESHARDS"
"""Variable of the processes that ``reshard`` starts as ranks. Launchers of others set ``RANK``."""


def _reshard(args: argparse.Namespace) -> None:
    """Write a checkpoint for another layout, optimizer included, without training: bit for bit the same state.

    Further flags of the training program, such as --zero-stage, hold for the new layout, which otherwise has the
    settings of the old one. Each rank of it is a process on this host, on its CPUs: the memory must hold all of them.
    Training loads a checkpoint on any layout; this does the work before, and elsewhere.
    """
    stages, copies = args.pipe_parallel_size, args.data_parallel_size
    sizes = {"model_parallel_size": "[1, inf)", "data_parallel_size": "[1, inf)", "pipe_parallel_size": "[0, inf)"}
    check_values(args, {**sizes, "time_limit": "(0, 604800]"})
    if args.output is None:
        kept = {"tp": args.model_parallel_size, "pp": stages, "dp": copies}
        place = args.path.resolve()
        name = "-".join([place.name, *(f"{axis}{size}" for axis, size in kept.items() if size > 1)])
        args.output = place.parent / name
    is_rank = _RESHARDS in os.environ
    saved = tag_at(args.path) if is_rank else find_source(args, "tag", "folder").saved
    assert saved is not None, "a checkpoint of this suite"
    layout_flags = ["--model-parallel-size", str(args.model_parallel_size), "--pipe-parallel-size", str(stages)]
    run_flags = [*args.run_flags, *layout_flags]

    from megatron.tools.convert.reshard import reshard, resharded_run

    replica = args.model_parallel_size * max(stages, 1)
    run = resharded_run(saved, run_flags, replica, copies, args.output)
    if is_rank:
        return reshard(saved, run)

    from megatron.tools.verify.runs import rank_context, run_ranks

    flags = ["--data-parallel-size", str(copies), "--output", str(args.output.absolute())]
    with signals_raised(), TemporaryDirectory() as folder:
        log, command = Path(folder) / "log", [__file__, "reshard", str(saved.path.absolute()), *run_flags, *flags]
        failure: str | None = "interrupted"
        try:
            environ = {**os.environ, _RESHARDS: "1"}
            failure = run_ranks(rank_context("cpu"), replica * copies, command, environ, log, args.time_limit)
        finally:
            if failure:
                shutil.rmtree(args.output, ignore_errors=True)
        if failure:
            ending, _, cause = failure.partition(":\n")
            if not ending.startswith("exit code"):
                raise LaunchError(f"{args.output} is not written: {ending}: give more with --time-limit")
            kinds = {f"exit code {kind.exit_code}": kind for kind in (ConfigError, CheckpointError, ResourceError)}
            problem = " ".join(cause.rpartition(": error: ")[2].split()) or f"a rank ended with {ending}"
            problem = problem.removeprefix(f"--save {args.output.absolute()}: ")
            problem = problem.replace(SAVE_ADVICE, "free some space, or name another --output")
            raise kinds.get(ending, LaunchError)(f"{args.output} is not written: {problem}")
    print(f"{args.output}: {saved.path} after iteration {saved.iteration}, from {saved.layout}")


def _reshard_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="a checkpoint folder or one tag of it")
    add("--output", type=Path, metavar="NAME", help="checkpoint folder to write (default: PATH with the layout)")
    add("--model-parallel-size", "--tensor-model-parallel-size", type=int, default=1, metavar="N", help="TP")
    add("--pipe-parallel-size", "--pipeline-model-parallel-size", type=int, default=0, metavar="N", help="PP")
    add("--data-parallel-size", type=int, default=1, metavar="N", help="DP, by which ZeRO divides the optimizer")
    add("--time-limit", type=float, default=86400, metavar="S", help="seconds that it may take")


COMMANDS = {
    "merge": Command(_merge_flags, _merge),
    "to-hf": Command(_to_hf_flags, _to_hf),
    "from-hf": Command(_from_hf_flags, _from_hf),
    "join-llava": Command(_join_llava_flags, _join_llava),
    "from-megatron": Command(_from_megatron_flags, _from_megatron),
    "merge-lora": Command(_merge_lora_flags, _merge_lora),
    "to-peft": Command(_to_peft_flags, _to_peft),
    "to-universal": Command(_to_universal_flags, _to_universal),
    "reshard": Command(_reshard_flags, _reshard),
}


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=ToolParser)
    for name, command in COMMANDS.items():
        text = inspect.cleandoc(command.run.__doc__)
        command.add_flags(commands.add_parser(name, description=text, help=text.splitlines()[0].rstrip(".")))
    return parser


if __name__ == "__main__":
    if _RESHARDS in os.environ:
        run_rank(main)
    run_tool(main)
