"""Command lines that break a rule of megatron/cli/validation/layout.py."""

BROKEN = [
    ("heads divide the hidden size", "--hidden-size 66", "--hidden-size 66 is not a multiple", "--hidden-size 68"),
    (
        "tensor-parallel ranks divide the heads",
        "--model-parallel-size 8",
        "--num-attention-heads 4 is not a multiple of --model-parallel-size 8: use 8",
        "--num-attention-heads 8",
    ),
    (
        "tensor-parallel ranks divide the MLP",
        "--model-parallel-size 2 --ffn-hidden-size 33",
        "--ffn-hidden-size 33 is not a multiple of --model-parallel-size 2: use 32 or 34",
        "--ffn-hidden-size 34",
    ),
    (
        "query groups divide the heads",
        "--num-query-groups 3",
        "--num-attention-heads 4 is not a multiple of --num-query-groups 3: use 3 or 6",
        "--num-query-groups 2",
    ),
    (
        "query groups and tensor-parallel ranks divide one another",
        "--num-attention-heads 12 --hidden-size 48 --num-query-groups 3 --model-parallel-size 2",
        "--num-query-groups 3 and --model-parallel-size 2: neither is a multiple of the other; use "
        "--model-parallel-size 1 or 3",
        "--num-query-groups 6",
    ),
    (
        "Ulysses ranks divide the heads",
        "--num-attention-heads 12 --hidden-size 48 --num-query-groups 3 --ds-sequence-parallel-size 4",
        "--ds-sequence-parallel-size 4 leaves 3 query groups to 4 ranks: neither is a multiple of the other",
        "--num-query-groups 4",
    ),
    (
        "sequence parallelism needs tensor parallelism",
        "--sequence-parallel",
        "--sequence-parallel has no effect with --model-parallel-size 1",
        "--model-parallel-size 2",
    ),
    (
        "sequence-parallel ranks divide the sequence",
        "--sequence-parallel --model-parallel-size 4 --seq-length 30",
        "--seq-length 30 is not a multiple of --sequence-parallel's --model-parallel-size 4: use 28 or 32",
        "--seq-length 28",
    ),
    (
        "sequence-parallel ranks divide the sequence",
        "--ds-sequence-parallel-size 4 --seq-length 30",
        "--seq-length 30 is not a multiple of --ds-sequence-parallel-size 4: use 28 or 32",
        "--seq-length 28",
    ),
    (
        "sequence-parallel ranks divide the sequence",
        "--ds-sequence-parallel-size 2 --sequence-parallel --model-parallel-size 2 --seq-length 30",
        "--seq-length 30 is not a multiple of --ds-sequence-parallel-size 2 x --sequence-parallel's "
        "--model-parallel-size 2: use 28 or 32",
        "--seq-length 28",
    ),
    (
        "Ulysses ranks divide the heads",
        "--ds-sequence-parallel-size 4 --model-parallel-size 2",
        "--num-attention-heads 4 is not a multiple of --ds-sequence-parallel-size 4 x --model-parallel-size 2: use 8",
        "--num-attention-heads 8",
    ),
    (
        "Ulysses ranks divide the heads",
        "--context-parallel-size 8 --cp-comm-type a2a",
        "--num-attention-heads 4 is not a multiple of --context-parallel-size 8: use 8",
        "--cp-comm-type p2p",
    ),
    (
        "context-parallel ranks have two chunks each",
        "--context-parallel-size 4 --seq-length 36",
        "--seq-length 36 is not a multiple of 2 x --context-parallel-size 4: use 32 or 40",
        "--seq-length 32",
    ),
    (
        "a2a+p2p has two sizes",
        "--context-parallel-size 4 --cp-comm-type a2a+p2p",
        "--cp-comm-type a2a+p2p needs two sizes whose product is --context-parallel-size 4: use "
        "--hierarchical-context-parallel-sizes, such as 2 2",
        "--hierarchical-context-parallel-sizes 2 2",
    ),
    (
        "a2a+p2p has two sizes",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
        "--hierarchical-context-parallel-sizes 2 2 has no effect with --cp-comm-type p2p: remove it, or use a2a+p2p",
        "--cp-comm-type a2a+p2p",
    ),
    (
        "--cp-comm-type needs --context-parallel-size",
        "--cp-comm-type all_gather",
        "--cp-comm-type has no effect without --context-parallel-size",
        None,
    ),
    (
        "positions cover the sequence",
        "--max-position-embeddings 16",
        "--seq-length 32 is more than --max-position-embeddings 16",
        "--seq-length 16",
    ),
]
