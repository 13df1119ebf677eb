"""Command lines that break a rule of megatron/cli/validation/encoder_decoder.py."""

SPLIT = "--pipeline-model-parallel-split-rank"
_RANGE = "the split rank leaves stages with layers to encoder and decoder"
BROKEN = [
    (_RANGE, f"t5 --pipe-parallel-size 2 {SPLIT} 2", f"{SPLIT} 2 is no stage between the first and", f"{SPLIT} 1"),
    (_RANGE, f"t5 --pipe-parallel-size 4 {SPLIT} 7", f"{SPLIT} 7 is no stage between the first and", f"{SPLIT} 3"),
    (_RANGE, f"t5 {SPLIT} 1", f"{SPLIT} 1 needs a pipeline: add --pipe-parallel-size, 2 or", "--pipe-parallel-size 2"),
    (
        _RANGE,
        f"t5 --pipe-parallel-size 8 --decoder-num-layers 8 {SPLIT} 5",
        f"{SPLIT} 5 gives 5 stages to the encoder of 4 layers: lower it",
        f"{SPLIT} 4",
    ),
    (
        _RANGE,
        f"t5 --pipe-parallel-size 8 --num-layers 8 {SPLIT} 1",
        f"{SPLIT} 1 gives 7 stages to the decoder of 3 layers: raise it",
        f"{SPLIT} 5",
    ),
    (
        _RANGE,
        f"t5 --pipe-parallel-size 2 --pipeline-partition 4,3 {SPLIT} 1",
        f"{SPLIT} 1 and --pipeline-partition 4,3 exclude each other: give one",
        "--pipeline-partition uniform",
    ),
    (
        _RANGE,
        f"t5 --pipe-parallel-size 2 --pipeline-schedule zbv {SPLIT} 1",
        f"{SPLIT} 1 divides stages, and with --pipeline-schedule zbv each has several model chunks: remove it, or use "
        "--pipeline-schedule zbh1",
        "--pipeline-schedule zbh1",
    ),
    (
        "an encoder with a decoder excludes sequence parallelism and DualPipeV",
        "t5 --model-parallel-size 2 --sequence-parallel",
        "--sequence-parallel cannot be combined with a model that has an encoder and a decoder: remove it",
        None,
    ),
    (
        "an encoder with a decoder excludes sequence parallelism and DualPipeV",
        "t5 --pipe-parallel-size 2 --gas 4 --pipeline-schedule dualpipev",
        "--pipeline-schedule dualpipev cannot be combined with a model that has an encoder and a decoder: remove it",
        "--pipeline-schedule 1f1b",
    ),
    (
        "the spans of a sample have sentinels",
        "t5 --vocab-extra-ids 0",
        "--vocab-extra-ids 0 leaves no sentinel for a span: use 100, or more",
        "--vocab-extra-ids 100",
    ),
    (
        "decoder positions cover the sequence",
        "t5 --position-embedding-type learned_absolute --max-position-embeddings 32 --decoder-seq-length 64",
        "--decoder-seq-length 64 is more than --max-position-embeddings 32: raise the latter",
        "--max-position-embeddings 64",
    ),
    (
        "relative positions are T5's",
        "t5 --position-embedding-type rope",
        "--position-embedding-type rope does not suit T5: use relative, learned_absolute or none",
        "--position-embedding-type none",
    ),
    (
        "relative positions are T5's",
        "--position-embedding-type relative",
        "--position-embedding-type relative does not suit GPT-2: use learned_absolute, rope or none",
        "--position-embedding-type rope",
    ),
    (
        "buckets belong to relative positions",
        "t5 --relative-attention-num-buckets 9",
        "--relative-attention-num-buckets 9 must be even, and half of it less than",
        "--relative-attention-num-buckets 10",
    ),
    (
        "buckets belong to relative positions",
        "t5 --position-embedding-type none --relative-attention-max-distance 64",
        "--relative-attention-num-buckets and -max-distance need --position-embedding-type relative: remove them",
        "--position-embedding-type relative",
    ),
    (
        "GEGLU excludes the fused GELU",
        "t5 --bias-gelu-fusion",
        "--geglu and --bias-gelu-fusion exclude each other: give --no-geglu, or remove --bias-gelu-fusion",
        "--no-geglu",
    ),
]
