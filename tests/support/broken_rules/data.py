"""Command lines that break a rule of megatron/cli/validation/data.py."""

BROKEN = [
    (
        "the tokenizer suits the model",
        "--tokenizer-type BertWordPieceCase",
        "--tokenizer-type BertWordPieceCase does not suit GPT-2: use GPT2BPETokenizer or WhitespaceTokenizer",
        "--tokenizer-type WhitespaceTokenizer",
    ),
    (
        "the tokenizer suits the model",
        "bert --tokenizer-type WhitespaceTokenizer",
        "--tokenizer-type WhitespaceTokenizer does not suit BERT: use BertWordPieceLowerCase or BertWordPieceCase",
        "--tokenizer-type BertWordPieceCase",
    ),
    (
        "--eod-token is for HuggingFaceTokenizer and GPTSentencePieceTokenizer",
        "--eod-token </s>",
        "--eod-token </s> has no effect with GPT2BPETokenizer: remove it",
        "--tokenizer-type Llama2Tokenizer",
    ),
    (
        "a pair of sentences fits into a sample",
        "bert --seq-length 4",
        "--seq-length 4 is too short for [CLS]",
        "--seq-length 5",
    ),
    (
        "a blend has a weight before each prefix",
        "--data-path 0.3 one 0.7",
        "--data-path 0.3 one 0.7: 3 words: give one prefix, or WEIGHT PREFIX for each data set",
        "--data-path 0.3 one 0.7 other",
    ),
    (
        "--valid-data-path needs --train-data-path",
        "--valid-data-path other",
        "--valid-data-path has no effect without --train-data-path",
        None,
    ),
    (
        "--test-data-path needs --train-data-path",
        "--test-data-path other",
        "--test-data-path has no effect without --train-data-path",
        None,
    ),
    ("--sft excludes --eod-mask-loss", "--sft --eod-mask-loss", "--sft and --eod-mask-loss exclude each other", None),
]
WARNED = [
    (
        "a vocabulary of whole words has no merges",
        "--tokenizer-type WhitespaceTokenizer",
        "--merge-file merges.txt is not used: WhitespaceTokenizer has no merges",
        "--tokenizer-type GPT2BPETokenizer",
    ),
]
