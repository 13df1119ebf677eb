"""Rules about tokenizers and data sets."""

from megatron.cli.validation.rules import Messages, rule
from megatron.config import RunConfig
from megatron.config.data import read_blend
from megatron.config.tokenizer_files import NULL_TOKENIZER, PUBLISHED, unused_merges
from megatron.model.architectures import architecture_of


@rule(
    "the tokenizer suits the model",
    why="GPT-2 needs an end-of-document token; BERT needs tokens that frame, pad and mask.",
)
def tokenizer(run: RunConfig) -> Messages:
    data, model = run.data, architecture_of(run.model)
    if model.provider is not None:
        return
    is_null = data.tokenizer_type == NULL_TOKENIZER
    if data.tokenizer_type not in model.tokenizers and not (
        is_null and (data.mock_data or not model.masked_lm or model.is_encoder_decoder)
    ):
        instead = " or ".join(model.tokenizers)
        mock = ", or add --mock-data" if is_null else ""
        yield f"--tokenizer-type {data.tokenizer_type} does not suit {run.model.architecture}: use {instead}{mock}"


@rule("BPE needs merges", why="The vocabulary does not determine how text is tokenized.")
def merges(run: RunConfig) -> Messages:
    data = run.data
    if data.tokenizer_type == "GPT2BPETokenizer" and data.merge_file is None and _needs_tokenizer(run):
        suits = "WhitespaceTokenizer" in architecture_of(run.model).tokenizers
        other = "; for a vocabulary of whole words use --tokenizer-type WhitespaceTokenizer" if suits else ""
        yield f"--merge-file is required with --tokenizer-type GPT2BPETokenizer{other}"


@rule(
    "--merge-file is for a tokenizer with merges",
    why="Command lines for Megatron-LM name a file of merges with any tokenizer.",
    only_warns=True,
)
def merges_of_words(run: RunConfig) -> Messages:
    yield from unused_merges(run.data.tokenizer_type, run.data.merge_file)


@rule("a tokenizer has a vocabulary", why="It is in a file, or for NullTokenizer a number.")
def tokenizer_files(run: RunConfig) -> Messages:
    data = run.data
    if data.tokenizer_type != NULL_TOKENIZER and data.vocab_file is None and _needs_tokenizer(run):
        if data.tokenizer_type in PUBLISHED:
            yield f"--tokenizer-model is required with --tokenizer-type {data.tokenizer_type}"
        yield "--vocab-file is required"


def _needs_tokenizer(run: RunConfig) -> bool:
    """Whether a tokenizer with files is needed: a provided model may do without."""
    return run.data.vocab_file is not None or architecture_of(run.model).provider is None


@rule("a pair of sentences fits into a sample", why="BERT's samples are pairs of sentences with three special tokens.")
def pairs(run: RunConfig) -> Messages:
    tokens = run.data.seq_length
    architecture = architecture_of(run.model)
    if architecture.masked_lm and not architecture.is_encoder_decoder and 0 < tokens < 5:
        yield f"--seq-length {tokens} is too short for [CLS] and two tokens with a [SEP] after each: use 5 or more"


@rule(
    "a blend has a weight before each prefix",
    why="The share of each data set is its weight divided by the sum of all weights.",
)
def blends(run: RunConfig) -> Messages:
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        try:
            if words := getattr(run.data, name):
                read_blend(words)
        except ValueError as error:
            yield f"--{name.replace('_', '-')} {' '.join(words)}: {error}"
