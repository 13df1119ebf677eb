"""Rules about tokenizers and data sets."""

from megatron.cli.validation.rules import Messages, excludes, needs, rule
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


@rule("BPE needs merges", why="The vocabulary alone does not determine how text is tokenized.")
def merges(run: RunConfig) -> Messages:
    data = run.data
    if data.tokenizer_type == "GPT2BPETokenizer" and data.merge_file is None and _needs_tokenizer(run):
        suits = "WhitespaceTokenizer" in architecture_of(run.model).tokenizers
        other = "; for a vocabulary of whole words use --tokenizer-type WhitespaceTokenizer" if suits else ""
        yield f"--merge-file is required with --tokenizer-type GPT2BPETokenizer{other}"


@rule(
    "a vocabulary of whole words has no merges",
    why="Command lines for Megatron-LM name a file of merges whatever the tokenizer.",
    otherwise="reads the file, which may not exist",
    only_warns=True,
)
def merges_of_words(run: RunConfig) -> Messages:
    yield from unused_merges(run.data.tokenizer_type, run.data.merge_file)


@rule(
    "--eod-token is for HuggingFaceTokenizer and GPTSentencePieceTokenizer",
    why="The end of a document is fixed in the others.",
)
def eod_token(run: RunConfig) -> Messages:
    data = run.data
    if data.eod_text is not None and data.tokenizer_type not in PUBLISHED:
        yield f"--eod-token {data.eod_text} has no effect with {data.tokenizer_type}: remove it"


_FILES = {"--vocab-file": "vocab_file", "--merge-file": "merge_file", "--tokenizer-model": "tokenizer_model"}


@rule("a tokenizer has a vocabulary", why="It is in a file, or for NullTokenizer a number.")
def tokenizer_files(run: RunConfig) -> Messages:
    data = run.data
    if data.tokenizer_type == NULL_TOKENIZER:
        for flag, name in _FILES.items():
            file = getattr(data, name)
            if file is not None:
                yield f"{flag} {file} has no effect with NullTokenizer: remove it, or give another --tokenizer-type"
        if data.vocab_size is None:
            yield "--tokenizer-type NullTokenizer needs --vocab-size, the number of tokens"
    elif data.vocab_file is None and _needs_tokenizer(run):
        if data.tokenizer_type in PUBLISHED:
            yield f"--tokenizer-model is required with --tokenizer-type {data.tokenizer_type}"
        yield "--vocab-file is required"


@rule(
    "--vocab-size is for NullTokenizer",
    why="The others count the tokens of their files. Published models may have more rows than tokens.",
    only_warns=True,
)
def vocab_size(run: RunConfig) -> Messages:
    if run.data.vocab_size is not None and run.data.tokenizer_type not in (NULL_TOKENIZER, *PUBLISHED):
        yield (
            f"--vocab-size {run.data.vocab_size} has no effect with {run.data.tokenizer_type}, which counts the tokens "
            "of its files: remove it"
        )


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


needs("data.train_data_path", "data.valid_data_path", "data.test_data_path")
excludes("data.sft", "data.eod_mask_loss", why="The loss mask of the data set decides which tokens count.")
