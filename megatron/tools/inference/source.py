"""Where a model to be used comes from, and the tokenizer that goes with it, as far as is known without torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.checkpoint.fingerprint import tokenizer_hash
from megatron.config import ModelConfig
from megatron.config.errors import ConfigError
from megatron.model.architectures import GPT2
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.tools.convert.huggingface_files import BPE, read_bpe, read_folder_bpe
from megatron.tools.convert.inspection import read_config, read_description
from megatron.tools.convert.kinds import Found, find


@dataclass(frozen=True)
class TokenizerFiles:
    """Files given in place of those that the source names."""

    vocab_file: str | None = None
    merge_file: str | None = None


@dataclass(frozen=True)
class Source:
    """A path that holds a model: a checkpoint of any layout, merged weights or a Hugging Face folder."""

    found: Found
    config: ModelConfig
    """The model whole and in fp32, its vocabulary not padded."""
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        """The path, with the tag where a folder holds several."""
        saved = self.found.saved
        return str(self.found.path if saved is None else saved.folder / saved.tag)

    @property
    def warnings(self) -> list[str]:
        """What is wrong with newer checkpoints of the folder, which this one stands in for."""
        saved = self.found.saved
        return [] if saved is None else [f"{problem}; taking {saved.tag}" for problem in saved.passed_over]


def open_source(path: Path, files: TokenizerFiles = TokenizerFiles()) -> Source:
    """What the model at ``path`` is, and its tokenizer, checked against each other. Reads no weights.

    Raises:
        ConfigError: the path or a file of the tokenizer is not there, or the tokenizer is another than the one
            that the model was trained with.
        DataError: a file of the tokenizer is broken.
        CheckpointError: the path holds no model, or one that is not whole.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; name a checkpoint")
    found = find(path)
    if found.kind == "huggingface":
        bpe = _folder_bpe(found, files)
        config, tokenizer = read_config(found, vocab_size=len(bpe.vocabulary)), _tokenizer_of(bpe)
    else:
        description = read_description(found)
        if description is None:
            raise ConfigError(f"{path} does not say what model it is; name the tag that it was made from")
        config, tokenizer = read_config(found), _run_tokenizer(path, description, files)
    if config.architecture != GPT2.name:
        raise ConfigError(f"{path} is a {config.architecture}, which continues no text: name a {GPT2.name}")
    if tokenizer.vocab_size != config.vocab_size:
        raise ConfigError(
            f"{path} is a model of {config.vocab_size} tokens, and the vocabulary has {tokenizer.vocab_size}; give the "
            "--vocab-file and the --merge-file that it was trained with"
        )
    return Source(found, config, tokenizer)


def config_on(config: ModelConfig, size: int, dtype: str) -> ModelConfig:
    """The same model for ``size`` tensor-parallel ranks, without kernels that training asked for.

    Raises ConfigError where so many ranks cannot share it.
    """
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(config, name) % size:
            raise ConfigError(
                f"{size} tensor-parallel ranks cannot share a model of {name} {getattr(config, name)}; start a number "
                "of processes that divides it"
            )
    return replace(
        config,
        padded_vocab_size=-(-config.vocab_size // size) * size,
        dtype=dtype,
        fused_kernels="torch",
        compile=False,  # anew for each length of a prompt
        bias_gelu_fusion=False,
        bias_dropout_fusion=False,
        recomputes_attention=False,
    )


def _run_tokenizer(path: Path, description: dict[str, Any], files: TokenizerFiles) -> Tokenizer:
    """The tokenizer of a training of this suite."""
    data = description["config"]["data"]
    kind = data["tokenizer_type"]
    chosen = (files.vocab_file or data["vocab_file"], files.merge_file or data["merge_file"])
    for flag, file in zip(("--vocab-file", "--merge-file"), chosen, strict=True):
        if file is not None and not Path(file).is_file():
            raise ConfigError(f"{flag} {file}: no such file; name the one that {path} was trained with")
    known = data.get("tokenizer_hash")
    if known and tokenizer_hash(kind, *chosen) != known:
        raise ConfigError(
            f"{' and '.join(file for file in chosen if file)}: another tokenizer than the one that {path} was trained "
            "with (their hashes differ); give its --vocab-file and --merge-file"
        )
    return build_tokenizer(kind, *chosen)


def _folder_bpe(found: Found, files: TokenizerFiles) -> BPE:
    """The tokenizer of a Hugging Face folder."""
    own = read_folder_bpe(found.path)
    if files == TokenizerFiles():
        if own is None:
            raise ConfigError(f"{found.path} holds no tokenizer; give --vocab-file and --merge-file")
        return own
    for flag, file in (("--vocab-file", files.vocab_file), ("--merge-file", files.merge_file)):
        if file is None or not Path(file).is_file():
            raise ConfigError(f"{flag} {file or 'is not given'}: a Hugging Face folder takes two files or none")
    given = read_bpe(files.vocab_file, files.merge_file)
    rows = read_config(found).vocab_size
    if own is None and len(given.vocabulary) != rows:
        raise ConfigError(f"{files.vocab_file} has {len(given.vocabulary)} tokens, and {found.path} has {rows}")
    if own is not None and (dict(given.vocabulary), list(given.merges)) != (dict(own.vocabulary), list(own.merges)):
        raise ConfigError(f"{files.vocab_file}: another tokenizer than that in {found.path}; leave the two flags out")
    return given


def _tokenizer_of(bpe: BPE) -> Tokenizer:
    with TemporaryDirectory() as folder:
        bpe.write(Path(folder))
        return GPT2BPETokenizer(f"{folder}/vocab.json", f"{folder}/merges.txt")
