"""Each rule: its message says what is wrong and what to do, and the suggested fix is legal."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.command_lines import CPU, CUDA, SMALL, complaints, parse, read

from megatron.config import flag_fields
from megatron.config.command_line import parse_run
from megatron.config.environment import expected_device, local_rank, world_size
from megatron.config.errors import ConfigError
from megatron.config.fields import ends, inside
from megatron.config.validation import RULES, violations

# Name of the rule; a command line that breaks it alone; the start of its message; what fixes it.
_YARN = "yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
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
    ("SwiGLU excludes GELU", "--swiglu --openai-gelu", "--swiglu and --openai-gelu exclude each other: remove", None),
    (
        "grouped-query attention has a number of groups",
        "--group-query-attention",
        "--group-query-attention needs --num-query-groups: give the number of key and value heads",
        "--num-query-groups 2",
    ),
    (
        "rotation needs rotary position embeddings",
        "--rotary-base 500000",
        "--rotary-base 500000 has no effect without --position-embedding-type rope",
        "--position-embedding-type rope",
    ),
    (
        "--tiled-mlp-num-shards needs --tiled-mlp",
        "--tiled-mlp-num-shards 4",
        "--tiled-mlp-num-shards has no effect without --tiled-mlp: add --tiled-mlp, or remove",
        "--tiled-mlp",
    ),
    ("--tiled-mlp excludes --compile", "--tiled-mlp --compile", "--tiled-mlp and --compile exclude each other", None),
    (
        "--tiled-mlp excludes the dropout of adapters",
        "--tiled-mlp --lora-rank 2 --lora-dropout 0.1",
        "--tiled-mlp and --lora-dropout 0.1 exclude each other: remove one",
        "--lora-target dense",
    ),
    (
        "FlexAttention runs on GPUs without dropout",
        "--flex-attention",
        "--flex-attention needs GPUs, and this run is on cpu: remove it",
        None,
    ),
    *(
        ("YaRN has a factor and an original length", f"--position-embedding-type {words}", message, remedy)
        for words, message, remedy in (
            (
                "yarn --yarn-rotary-scaling-factor 4",
                "--position-embedding-type yarn needs --yarn-original-max-position-embeddings: add it",
                "--yarn-original-max-position-embeddings 16",
            ),
            (
                "rope --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16",
                "--yarn-rotary-scaling-factor and --yarn-original-max-position-embeddings has no effect without",
                "--position-embedding-type yarn",
            ),
            (
                f"{_YARN} --yarn-beta-fast 1",
                "--yarn-beta-fast 1 is no more than --yarn-beta-slow 1",
                "--yarn-beta-fast 2",
            ),
            (f"{_YARN} --rotary-base 1", "--position-embedding-type yarn needs waves that become", "--rotary-base 2"),
        )
    ),
    *(
        (
            "one rule extends the rotation",
            f"--position-embedding-type {words}",
            f"{rivals} exclude each other: keep one",
            None,
        )
        for words, rivals in (
            (f"{_YARN} --use-rope-scaling", "--position-embedding-type yarn and --use-rope-scaling"),
            (
                "rope --use-rope-scaling --rotary-seq-len-interpolation-factor 2",
                "--use-rope-scaling and --rotary-seq-len-interpolation-factor",
            ),
        )
    ),
    (
        "rotation turns pairs of dimensions",
        "--position-embedding-type rope --rotary-percent 0.2",
        "--rotary-percent 0.2 of heads of 16 rotates 3 dimensions, which is no even number",
        "--rotary-percent 0.25",
    ),
    (
        "--rope-scaling-factor needs --use-rope-scaling",
        "--rope-scaling-factor 4",
        "--rope-scaling-factor has no effect without --use-rope-scaling",
        "--use-rope-scaling --position-embedding-type rope",
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
        "partitioned activations exclude --sequence-parallel",
        "--sequence-parallel --model-parallel-size 2 --checkpoint-activations --partition-activations",
        "--partition-activations cannot be combined with --sequence-parallel",
        None,
    ),
    (
        "positions cover the sequence",
        "--max-position-embeddings 16",
        "--seq-length 32 is more than --max-position-embeddings 16",
        "--seq-length 16",
    ),
    ("each stage has a layer", "--pipe-parallel-size 8", "--num-layers 4 is less than", "--num-layers 8"),
    (
        "each stage has a layer",
        "--pipe-parallel-size 4 --pipeline-schedule dualpipev --gas 8",
        "--num-layers 4 is less than the two model chunks per stage of --pipe-parallel-size 4",
        "--num-layers 8",
    ),
    (
        "each stage has a layer",
        "--pipe-parallel-size 8 --pipeline-partition uniform",
        "--pipeline-partition uniform has 5 parts to distribute, less than --pipe-parallel-size 8: use at most "
        "5 stages",
        "--num-layers 7",
    ),
    *(
        (
            "the partition fits the model",
            f"--pipe-parallel-size {stages} --pipeline-partition {method}",
            message,
            remedy,
        )
        for stages, method, message, remedy in [
            (2, "profile", "--pipeline-partition profile: choose from uniform, parameters, flops, type:REG", None),
            (2, "type:(", "--pipeline-partition type:(: that is no regular expression", None),
            (2, "type:Mamba", "--pipeline-partition type:Mamba matches no layer: the layers are WordEmbedding, ", None),
            (2, "4", "--pipeline-partition 4: give 2 numbers, one for each stage of", "--pipe-parallel-size 1"),
            (2, "1,2", "--pipeline-partition 1,2 totals 3 layers, and --num-layers is 4", "--num-layers 3"),
            (4, "2,0,1,1", "--pipeline-partition 2,0,1,1 leaves a middle stage empty", None),
            (
                2,
                "2,2 --pipeline-schedule dualpipev --gas 4",
                "--pipeline-partition 2,2: give 4 numbers, two for each stage of --pipeline-schedule dualpipev",
                "--pipeline-partition 0,2,2,0",
            ),
        ]
    ),
    (
        "a first stage without layers needs fp32 and ZeRO 0",
        "--pipe-parallel-size 2 --pipeline-partition 0,4 --zero-stage 1",
        "--pipeline-partition 0,4 leaves the first stage with the embeddings only, which works in fp32 at "
        "--zero-stage 0 only",
        "--pipeline-partition 1,3",
    ),
    (
        "--pipeline-partition needs --pipe-parallel-size",
        "--pipeline-partition 4",
        "--pipeline-partition has no effect without --pipe-parallel-size",
        "--pipe-parallel-size 1",
    ),
    (
        "--pipeline-schedule needs --pipe-parallel-size",
        "--pipeline-schedule dualpipev",
        "--pipeline-schedule has no effect without --pipe-parallel-size",
        "--pipe-parallel-size 1 --gas 2",
    ),
    (
        "DualPipeV has two micro-batches per stage",
        "--pipe-parallel-size 2 --pipeline-schedule dualpipev --gas 3",
        "--pipeline-schedule dualpipev with --pipe-parallel-size 2 needs 4 micro-batches or more, and there are 3",
        "--gas 4",
    ),
    *(
        (
            f"{flag.split()[0]} needs --pipe-parallel-size",
            flag,
            f"{flag.split()[0]} has no effect without --pipe-parallel-size",
            "--pipe-parallel-size 1 --gas 2",
        )
        for flag in ("--num-layers-per-virtual-pipeline-stage 1", "--num-virtual-stages-per-pipeline-rank 2")
    ),
    (
        "the interleaved schedule has a multiple of its stages as micro-batches",
        "--pipe-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --gas 3",
        "--pipeline-schedule interleaved with --pipe-parallel-size 2 needs a multiple of 2 micro-batches, and there "
        "are 3: use --gas 2 or 4",
        "--gas 4",
    ),
    (
        "schedules that divide the backward pass exclude --tiled-mlp",
        "--pipe-parallel-size 2 --pipeline-schedule zbh1 --tiled-mlp",
        "--pipeline-schedule zbh1 cannot be combined with --tiled-mlp",
        "--pipeline-schedule 1f1b",
    ),
    (
        "schedules that divide the backward pass exclude --compile",
        "--pipe-parallel-size 2 --pipeline-schedule zbh1 --compile",
        "--pipeline-schedule zbh1 cannot be combined with --compile",
        "--pipeline-schedule 1f1b",
    ),
    (
        "the pipeline runs at ZeRO 0 or 1",
        "--pipe-parallel-size 1 --zero-stage 2",
        "--zero-stage 2 cannot be combined with --pipe-parallel-size 1: the pipeline accumulates gradients over "
        "micro-batches",
        "--zero-stage 1",
    ),
    *(
        (
            f"{flag.split()[0]} needs --num-experts",
            flag,
            f"{flag.split()[0]} has no effect without --num-experts",
            "--num-experts 8",
        )
        for flag in (
            "--moe-layer-freq 2",
            "--moe-ffn-hidden-size 32",
            "--moe-router-topk 3",
            "--moe-router-pre-softmax",
            "--moe-router-load-balancing-type none",
            "--moe-aux-loss-coeff 0.1",
            "--moe-z-loss-coeff 0.1",
            "--moe-router-dtype fp64",
            "--moe-expert-capacity-factor 1",
            "--moe-shared-expert-intermediate-size 32",
            "--moe-grouped-gemm",
            "--moe-per-layer-logging",
            "--expert-model-parallel-size 2",
        )
    ),
    (
        "the router chooses from the experts",
        "--num-experts 4 --moe-router-topk 5",
        "--moe-router-topk 5 is more than --num-experts 4: lower it",
        "--moe-router-topk 4",
    ),
    (
        "--moe-z-loss-coeff needs --num-experts",
        "--num-experts 1 --moe-z-loss-coeff 0.1",
        "--moe-z-loss-coeff has no effect without --num-experts",
        "--num-experts 8",
    ),
    (
        "a router that chooses one expert has a gradient",
        "--num-experts 4 --moe-router-topk 1",
        "--moe-router-topk 1 leaves the router without a gradient: add --moe-router-pre-softmax, or choose 2",
        "--moe-router-pre-softmax",
    ),
    (
        "a list of layers with experts is of all layers",
        "--num-experts 4 --moe-layer-freq [0]+[1]*2",
        "--moe-layer-freq [0]*1+[1]*2 is of 3 layers, not of --num-layers 4: give one each",
        "--moe-layer-freq ([0]+[1])*2",
    ),
    (
        "a list of layers with experts is of all layers",
        "--num-experts 4 --moe-layer-freq [0]*4",
        "--moe-layer-freq [0]*4 leaves no layer with experts: write 1 for some",
        "--moe-layer-freq [0]*3+[1]",
    ),
    (
        "tensor-parallel ranks divide each expert",
        "--num-experts 4 --model-parallel-size 4 --moe-ffn-hidden-size 6",
        "--moe-ffn-hidden-size 6 is not a multiple of --model-parallel-size 4: use 4 or 8",
        "--moe-ffn-hidden-size 8",
    ),
    (
        "experts are split as the other layers are",
        "--num-experts 4 --model-parallel-size 2 --expert-tensor-parallel-size 1",
        "--expert-tensor-parallel-size 1 differs from --model-parallel-size 2: use 2",
        "--expert-tensor-parallel-size 2",
    ),
    (
        "experts are split as the other layers are",
        "--expert-tensor-parallel-size 2",
        "--expert-tensor-parallel-size 2 has no effect without --num-experts",
        "--expert-tensor-parallel-size 1",
    ),
    (
        "expert-parallel ranks divide the experts",
        "--num-experts 6 --expert-model-parallel-size 4",
        "--num-experts 6 is not a multiple of --expert-model-parallel-size 4: use 4 or 8",
        "--num-experts 8",
    ),
    (
        "expert-parallel ranks divide the data-parallel ranks",
        "--num-experts 12 --expert-model-parallel-size 3",
        "--expert-model-parallel-size 3 does not divide the data-parallel size 8: use a divisor of it, or more",
        "--expert-model-parallel-size 4",
    ),
    (
        "expert parallelism needs ZeRO 0, 1 or 2 without offloading",
        "--num-experts 4 --expert-model-parallel-size 2 --zero-stage 3",
        "--expert-model-parallel-size does not work with --zero-stage 3: use Adam at --zero-stage 1 or 2",
        "--zero-stage 2",
    ),
    (
        "with expert parallelism ZeRO reduces and scatters gradients",
        "--num-experts 4 --expert-model-parallel-size 2 --zero-stage 1 --no-zero-reduce-scatter",
        "--expert-model-parallel-size does not work with --no-zero-reduce-scatter at --zero-stage 1: remove it",
        "--zero-stage 0",
    ),
    (
        "with expert parallelism ZeRO reduces and scatters gradients",
        "--num-experts 4 --expert-model-parallel-size 2 --zero-stage 2 --no-zero-contiguous-gradients",
        "--expert-model-parallel-size does not work with --no-zero-contiguous-gradients at --zero-stage 2",
        "--zero-stage 1",
    ),
    (
        "a mixture of experts is trained by plain means",
        "--num-experts 4 --lora-rank 2",
        "--num-experts cannot be combined with --lora-rank: adapters belong to linear layers",
        None,
    ),
    (
        "ranks that share a sample hold all experts and drop no token of it",
        "--num-experts 4 --context-parallel-size 2 --expert-model-parallel-size 2",
        "--context-parallel-size 2 cannot be combined with --expert-model-parallel-size: gradients of experts would",
        "--expert-model-parallel-size 1",
    ),
    (
        "ranks that share a sample hold all experts and drop no token of it",
        "--num-experts 4 --ds-sequence-parallel-size 2 --moe-expert-capacity-factor 1.5",
        "--ds-sequence-parallel-size 2 cannot be combined with --moe-expert-capacity-factor, which counts whole",
        None,
    ),
    (
        "with expert parallelism each stage has a layer with experts",
        "--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 2 --moe-layer-freq 4",
        "--pipeline-partition type:ParallelTransformerLayer leaves stage 1 without a layer with experts (--moe-layer-",
        "--moe-layer-freq 3",
    ),
    (
        "with expert parallelism each stage has a layer with experts",
        "--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 4 --num-layers 3 "
        "--pipeline-partition uniform",
        "--pipeline-partition uniform leaves stage 3 without a layer with experts (--moe-layer-freq 1): divide the",
        "--num-layers 8",
    ),
    (
        "with expert parallelism each stage has a layer with experts",
        "--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 2 --pipeline-partition parameters",
        "--pipeline-partition parameters may leave a stage without a layer with experts: remove it, or give the",
        "--pipeline-partition 3,1",
    ),
    (
        "with expert parallelism each stage has a layer with experts",
        "--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 2 --pipeline-partition 4,0",
        "--pipeline-partition 4,0 leaves stage 1 without a layer with experts (--moe-layer-freq 1): divide the layers",
        "--pipeline-partition 3,1",
    ),
    (
        "a balanced router has a loss",
        "--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
        "--moe-aux-loss-coeff 0.1 has no effect with --moe-router-load-balancing-type none: choose another type",
        "--moe-router-load-balancing-type seq_aux_loss",
    ),
    ("fp16 needs a GPU", "--fp16", "--fp16 does not work on the CPU: use --bf16", None),
    *(
        (
            f"{flag.split()[0]} needs --lora-rank",
            flag,
            f"{flag.split()[0]} has no effect without --lora-rank",
            "--lora-rank 4",
        )
        for flag in ("--lora-alpha 8", "--lora-dropout 0.1", "--lora-target dense")
    ),
    (
        "adapters belong to whole linear layers",
        "--lora-rank 4 --lora-target q_proj",
        "--lora-target q_proj needs all of q_proj k_proj v_proj",
        "--lora-target q_proj k_proj v_proj",
    ),
    (
        "adapters belong to whole linear layers",
        "--lora-rank 4 --lora-target embedding",
        "--lora-target embedding is unknown: choose from query_key_value dense dense_h_to_4h dense_4h_to_h",
        "--lora-target dense",
    ),
    (
        "adapters exclude Muon",
        "--lora-rank 4 --optimizer muon",
        "--lora-rank does not work with --optimizer muon: use --optimizer adam",
        "--optimizer adam",
    ),
    (
        "frozen weights beside adapters are not on NVMe",
        "--lora-rank 4 --zero-stage 3 --nvme-path . --offload-param nvme",
        "--lora-rank does not work with --offload-param nvme: use --offload-param cpu",
        "--offload-optimizer nvme --offload-param cpu",
    ),
    (
        "every stage has an adapter",
        "--lora-rank 4 --pipe-parallel-size 1 --pipeline-partition parameters",
        "--pipeline-partition parameters may leave a stage without a transformer layer, and so without an adapter of "
        "--lora-rank: remove it, or give the number of layers of each stage",
        "--pipeline-partition 4",
    ),
    ("--sft excludes --eod-mask-loss", "--sft --eod-mask-loss", "--sft and --eod-mask-loss exclude each other", None),
    ("--fp16 excludes --bf16", "gpu --fp16 --bf16", "--fp16 and --bf16 exclude each other", None),
    (
        "the initial loss scale is a power of two",
        "--initial-loss-scale 1000",
        "--initial-loss-scale 1000 is not a power of two: use 1024",
        "--initial-loss-scale 1024",
    ),
    ("the smallest loss scale is a whole number", "--min-scale 1.5", "--min-scale 1.5 is not a whole", "--min-scale 2"),
    (
        "a half-precision loss needs half precision",
        "--fp16-lm-cross-entropy",
        "--fp16-lm-cross-entropy has no effect in fp32",
        "--bf16",
    ),
    (
        "an fp32 residual connection needs half precision",
        "--fp32-residual-connection",
        "--fp32-residual-connection has no effect in fp32",
        "--bf16",
    ),
    (
        "NCCL needs GPUs",
        "--distributed-backend nccl",
        "--distributed-backend nccl needs GPUs",
        "--distributed-backend gloo",
    ),
    (
        "--watchdog-minutes ends a hung run before its collectives time out",
        "--watchdog-minutes 30",
        "--watchdog-minutes 30 is too late for collectives that time out after 30 minutes",
        "--watchdog-minutes 30 --distributed-timeout-minutes 30.5",
    ),
    (
        "--fused-kernels apex needs apex",
        "--fused-kernels apex",
        "--fused-kernels apex needs CUDA",
        "--fused-kernels auto",
    ),
    *(
        (
            "the fused causal attention kernel is possible",
            f"--scaled-upper-triang-masked-softmax-fusion {flag}",
            f"--scaled-upper-triang-masked-softmax-fusion cannot be combined with {flag}",
            None,
        )
        for flag in (
            "--attention-softmax-in-fp32",
            "--apply-query-key-layer-scaling",
            "--reset-attention-mask",
            "--pre-tokens 30",
        )
    ),
    *(
        ("an offloaded optimizer needs ZeRO", flag, "--offload-optimizer cpu needs ZeRO", "--zero-stage 1")
        for flag in ("--offload-optimizer cpu", "--cpu-optimizer")
    ),
    *(
        (
            "an optimizer on NVMe needs ZeRO 3",
            f"--offload-optimizer nvme --nvme-path d --zero-stage {stage}",
            "--offload-optimizer nvme works at ZeRO 3 only: use --zero-stage 3, or --offload-optimizer cpu",
            "--zero-stage 3",
        )
        for stage in (0, 1, 2)
    ),
    *(
        (
            "offloaded weights need ZeRO 3",
            f"--offload-param cpu --zero-stage {stage}",
            "--offload-param cpu works at ZeRO 3 only: use --zero-stage 3, or remove it",
            "--zero-stage 3",
        )
        for stage in (0, 1, 2)
    ),
    *(
        (
            "offload to NVMe needs a folder",
            f"{flag} nvme --zero-stage 3",
            "offload to nvme needs a folder on that device: add --nvme-path",
            "--nvme-path d",
        )
        for flag in ("--offload-optimizer", "--offload-param")
    ),
    (
        "offload to NVMe needs a folder",
        "--nvme-path d --zero-stage 3",
        "--nvme-path has no effect without --offload-optimizer nvme or --offload-param nvme",
        "--offload-param nvme",
    ),
    (
        "--cpu-torch-adam needs --offload-optimizer",
        "--cpu_torch_adam --zero-stage 1",
        "--cpu-torch-adam has no effect without --offload-optimizer",
        "--cpu-optimizer",
    ),
    (
        "--no-offload-pin-memory needs offload",
        "--no-offload-pin-memory --zero-stage 3",
        "--no-offload-pin-memory has no effect without --offload-optimizer or --offload-param",
        "--offload-param cpu",
    ),
    (
        "Muon runs at ZeRO 0 to 2 on the device",
        "--optimizer muon --zero-stage 3",
        "--optimizer muon does not work at --zero-stage 3",
        "--zero-stage 2",
    ),
    (
        "Muon runs at ZeRO 0 to 2 on the device",
        "--optimizer muon --zero-stage 1 --offload-optimizer cpu",
        "--optimizer muon cannot be offloaded",
        "--offload-optimizer none",
    ),
    (
        "Adafactor runs without ZeRO and tensor parallelism",
        "--optimizer adafactor --zero-stage 1",
        "--optimizer adafactor needs whole matrices on each rank: use --zero-stage 0, or --optimizer adam",
        "--zero-stage 0",
    ),
    (
        "an optimizer on NVMe is Adam",
        "--optimizer sgd --zero-stage 3 --offload-optimizer nvme --nvme-path d",
        "--optimizer sgd does not work with --offload-optimizer nvme",
        "--optimizer adam",
    ),
    (
        "--compile excludes ZeRO 3",
        "--compile --zero-stage 3",
        "--compile does not work at --zero-stage 3: use --zero-stage 2",
        "--zero-stage 2",
    ),
    *(
        (
            "gradient accumulation fusion needs gradients that stay in place",
            f"--gradient-accumulation-fusion --gas 2 {broken}",
            "--gradient-accumulation-fusion has no effect if DeepSpeed moves gradients after each micro-batch: "
            f"use {instead}, or remove it",
            mended,
        )
        for broken, instead, mended in (
            ("--zero-stage 2", "--zero-stage 1", "--zero-stage 1"),
            ("--zero-stage 1 --zero-overlap-comm", "no --zero-overlap-comm", None),
            ("--zero-stage 1 --offload-optimizer cpu", "no --offload-optimizer", "--offload-optimizer none"),
            ("--zero-stage 1 --bf16 --grad-accum-dtype fp32", "no --grad-accum-dtype fp32", "--grad-accum-dtype bf16"),
        )
    ),
    (
        "gradient accumulation fusion needs gradients that stay in place",
        "--gradient-accumulation-fusion",
        "--gradient-accumulation-fusion has no effect with one micro-batch a step: raise --gas",
        "--gas 2",
    ),
    (
        "--gradient-accumulation-fusion excludes --compile",
        "--gradient-accumulation-fusion --compile --gas 2",
        "--gradient-accumulation-fusion and --compile exclude each other",
        None,
    ),
    (
        "overlapped reduction needs ZeRO on the plain engine",
        "--zero-overlap-comm",
        "--zero-overlap-comm has no effect without ZeRO: add --zero-stage 1",
        "--zero-stage 1",
    ),
    (
        "overlapped reduction needs ZeRO on the plain engine",
        "--zero-overlap-comm --zero-stage 1 --pipe-parallel-size 1",
        "--zero-overlap-comm does not work in a pipeline",
        "--pipe-parallel-size 0",
    ),
    *(
        (
            "round-robin gradients need ZeRO 1 or 2",
            f"--zero-round-robin-gradients --zero-stage {stage}",
            f"--zero-round-robin-gradients has no effect at --zero-stage {stage}: use --zero-stage 1 or 2",
            "--zero-stage 2",
        )
        for stage in (0, 3)
    ),
    *(
        (
            "coalesced reduction needs ZeRO 2 or 3",
            f"--zero-coalesce-grad-reduction --zero-stage {stage}",
            f"--zero-coalesce-grad-reduction has no effect at --zero-stage {stage}, which reduces gradients once",
            "--zero-stage 2",
        )
        for stage in (0, 1)
    ),
    (
        "coalesced reduction accumulates in the type of the weights",
        "--zero-coalesce-grad-reduction --zero-stage 3 --bf16 --grad-accum-dtype fp32",
        "--zero-coalesce-grad-reduction cannot be combined with --grad-accum-dtype fp32: remove one",
        "--grad-accum-dtype bf16",
    ),
    (
        "coalesced reduction at ZeRO 2 excludes overlapped reduction",
        "--zero-coalesce-grad-reduction --zero-stage 2 --zero-overlap-comm",
        "--zero-coalesce-grad-reduction at --zero-stage 2 leaves nothing to overlap: remove it",
        "--zero-stage 3",
    ),
    (
        "gradients accumulate in fp32 or in the weights' type",
        "--grad-accum-dtype bf16",
        "--grad-accum-dtype bf16 is for half precision, and weights are fp32: add --bf16",
        "--bf16",
    ),
    (
        "gradients accumulate in fp32 or in the weights' type",
        "gpu --grad-accum-dtype bf16 --fp16",
        "--grad-accum-dtype bf16 cannot be combined with --fp16: use --grad-accum-dtype fp32",
        "--grad-accum-dtype fp32",
    ),
    *(
        (
            "selective recomputation is neither partitioned nor grouped",
            f"{flag} --recompute-granularity selective",
            f"{flag} cannot be combined with --recompute-granularity selective: use full",
            "--recompute-granularity full",
        )
        for flag in ("--partition-activations", "--checkpoint-num-layers 2")
    ),
    *(
        (
            "activations in one buffer, or in CPU memory, are partitioned",
            f"{flag} --checkpoint-activations",
            f"{flag} cannot work without --partition-activations",
            "--partition-activations",
        )
        for flag in ("--contiguous-checkpointing", "--checkpoint-in-cpu")
    ),
    (
        "the micro-batch average of the loss needs a mask",
        "--loss-normalization micro-batch",
        "--loss-normalization micro-batch has no effect without --eod-mask-loss",
        "--eod-mask-loss",
    ),
    ("--min-lr is at most --lr", "--min-lr 1", "--min-lr 1 is more than --lr 0.001", "--lr 1"),
    (
        "warm-up fits into the decay",
        "--lr-warmup-iters 101",
        "the warm-up of 101 iterations is longer than the decay of 100",
        "--train-iters 101",
    ),
    (
        "warm-up fits into the decay",
        "--lr-decay-style WSD --lr-wsd-decay-iters 90 --warmup 0.2",
        "the warm-up of 20 iterations and --lr-wsd-decay-iters 90 do not fit into 100",
        "--warmup 0.1",
    ),
    (
        "a batch size that varies needs --train-samples",
        "--global-batch-size 4 --rampup-batch-size 2 2 20",
        "--rampup-batch-size needs --train-samples: give it instead of --train-iters",
        None,
    ),
    ("WSD needs --lr-wsd-decay-iters", "--lr-decay-style WSD", "--lr-decay-style WSD needs", "--lr-wsd-decay-iters 5"),
    (
        "WSD needs --lr-wsd-decay-iters",
        "--lr-wsd-decay-iters 5",
        "--lr-wsd-decay-iters has no effect without --lr-decay-style WSD",
        "--lr-decay-style WSD",
    ),
    (
        "--override-lr-scheduler excludes --use-checkpoint-lr-scheduler",
        "--override-lr-scheduler --use-checkpoint-lr-scheduler",
        "--override-lr-scheduler and --use-checkpoint-lr-scheduler exclude each other",
        None,
    ),
    (
        "--rewind-on-spike needs --save-interval",
        "--rewind-on-spike --save out",
        "--rewind-on-spike has no effect without --save-interval",
        "--save-interval 5",
    ),
    (
        "--spike-factor needs --rewind-on-spike",
        "--spike-factor 3",
        "--spike-factor has no effect without --rewind-on-spike",
        "--rewind-on-spike --save out --save-interval 5",
    ),
    ("--override needs --load", "--override", "--override has no effect without --load", "--load in"),
    ("--finetune needs --load", "--finetune", "--finetune has no effect without --load", "--load in"),
    ("--async-save needs --save", "--async-save", "--async-save has no effect without --save", "--save out"),
    (
        "--snapshot-interval needs --save",
        "--snapshot-interval 2",
        "--snapshot-interval has no effect without --save",
        "--save out --auto-resume",
    ),
    (
        "--snapshot-dir needs --snapshot-interval",
        "--snapshot-dir /mnt",
        "--snapshot-dir has no effect without --snapshot-interval",
        "--snapshot-interval 2 --save out --auto-resume",
    ),
    (
        "--snapshot-interval needs a run that resumes by itself",
        "--snapshot-interval 2 --save out",
        "--snapshot-interval has no effect on a run that starts anew: add --auto-resume",
        "--load out",
    ),
    (
        "--snapshot-interval excludes --no-save-optim",
        "--snapshot-interval 2 --save out --auto-resume --no-save-optim",
        "--snapshot-interval and --no-save-optim exclude each other",
        None,
    ),
    (
        "--snapshot-interval excludes offload to NVMe",
        "--snapshot-interval 2 --save out --auto-resume --zero-stage 3 --offload-param nvme --nvme-path /nvme",
        "--snapshot-interval does not work with offload to nvme: offload to cpu, or remove it",
        None,
    ),
    ("--keep-last needs --save", "--keep-last 2", "--keep-last has no effect without --save", "--save out"),
    (
        "--keep-every needs --keep-last",
        "--save out --keep-every 2",
        "--keep-every has no effect without --keep-last",
        "--keep-last 1",
    ),
    ("--auto-resume needs --save", "--auto-resume", "--auto-resume has no effect without --save", "--save out"),
    (
        "--auto-resume excludes --finetune",
        "--auto-resume --save out --load in --finetune",
        "--auto-resume and --finetune exclude each other",
        None,
    ),
    (
        "--on-save-error needs --save",
        "--on-save-error continue",
        "--on-save-error has no effect without --save",
        "--save out",
    ),
    (
        "--load-strict needs a checkpoint to load",
        "--load-strict",
        "--load-strict has no effect without --load",
        "--load in",
    ),
    (
        "traced and profiled iterations are part of the run",
        "--trace out --trace-steps 4:2",
        "--trace-steps 4:2: give the first iteration and the last, such as 2:4",
        "--trace-steps 2:4",
    ),
    (
        "traced and profiled iterations are part of the run",
        "--trace out --profile-steps 0:2",
        "--profile-steps 0:2: give the first iteration and the last, such as 2:4",
        "--profile-steps 1:2",
    ),
    (
        "traced and profiled iterations are part of the run",
        "--trace out --profile-steps 101:102",
        "--profile-steps 101:102 begins after the last iteration, 100: choose earlier ones",
        "--train-iters 101",
    ),
    (
        "traced and profiled iterations are part of the run",
        "--trace out --flops-profile-step 101",
        "--flops-profile-step 101 is after the last iteration, 100: choose another",
        "--flops-profile-step 100",
    ),
    ("--trace-steps needs --trace", "--trace-steps 3:4", "--trace-steps has no effect without --trace", "--trace out"),
    (
        "a profile needs a folder",
        "--profile-steps 3:4",
        "--profile-steps needs a folder: add --profile-dir, or --trace",
        "--profile-dir out",
    ),
    (
        "a profile needs a folder",
        "--profile-dir out",
        "--profile-dir has no effect without --profile-steps or --flops-profile-step: add one",
        "--flops-profile-step 3",
    ),
    (
        "the FLOPs profiler needs the plain engine",
        "--trace out --flops-profile-step 3 --pipe-parallel-size 2",
        "--flops-profile-step cannot be combined with --pipe-parallel-size 2: use --pipe-parallel-size 0",
        "--pipe-parallel-size 0",
    ),
    (
        "--repartition-from needs --pipe-parallel-size",
        "--repartition-from out",
        "--repartition-from has no effect without --pipe-parallel-size",
        None,
    ),
    (
        "--straggler-window needs --straggler-report",
        "--straggler-window 9",
        "--straggler-window has no effect without --straggler-report",
        "--straggler-report 0.3",
    ),
    ("--rank needs --dry-run", "--rank 0", "--rank has no effect without --dry-run", "--dry-run"),
    (
        "--rank names ranks of the run",
        "--dry-run --rank 0,5",
        "--rank 5: there is 1 process, counted from 0",
        "--world-size 6",
    ),
    (
        "--rank names ranks of the run",
        "--dry-run --rank 0-5",
        "--rank 0-5 is not a list of numbers",
        "--rank 0",
    ),
    (
        "--explain excludes --dry-run",
        "--explain --dry-run",
        "--explain and --dry-run exclude each other",
        None,
    ),
]
if find_spec("apex") is None:
    BROKEN.append(
        (
            "--fused-kernels apex needs apex",
            "gpu --fused-kernels apex",
            "--fused-kernels apex: apex is not installed",
            "--fused-kernels torch",
        )
    )


# The same, of rules that only warn.
WARNED = [
    (
        "a global batch is balanced in one micro-batch",
        "--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1 --gas 2",
        "--moe-router-load-balancing-type global_aux_loss with 2 micro-batches a step depends on their number: --gas 1",
        "--moe-router-load-balancing-type seq_aux_loss",
    ),
    (
        "--log-timers-to-tensorboard needs --timing-log-level",
        "--log-timers-to-tensorboard --tensorboard-dir board",
        "--log-timers-to-tensorboard has no effect without --timing-log-level",
        "--timing-log-level 1",
    ),
    (
        "--log-timers-to-tensorboard needs --tensorboard-dir",
        "--log-timers-to-tensorboard --timing-log-level 1",
        "--log-timers-to-tensorboard has no effect without --tensorboard-dir",
        "--tensorboard-dir board",
    ),
    ("--loss-scale needs --fp16", "gpu --loss-scale 8", "--loss-scale has no effect without --fp16", "--fp16"),
    ("--save-interval needs --save", "--save-interval 5", "--save-interval has no effect without --save", "--save out"),
    (
        "--snapshot-interval is not a multiple of --save-interval",
        "--snapshot-interval 10 --save-interval 5 --save out --auto-resume",
        "--snapshot-interval 10 has no effect with --save-interval 5: lower it",
        "--snapshot-interval 3",
    ),
    (
        "fp32 accumulation needs half precision",
        "--accumulate-allreduce-grads-in-fp32",
        "--grad-accum-dtype fp32 has no effect in fp32: add --bf16",
        "--bf16",
    ),
    (
        "a vocabulary of whole words has no merges",
        "--tokenizer-type WhitespaceTokenizer",
        "--merge-file merges.txt is not used: WhitespaceTokenizer has no merges",
        "--tokenizer-type GPT2BPETokenizer",
    ),
    *(
        (
            f"{flag.split()[0]} needs --checkpoint-activations",
            flag,
            f"{flag.split()[0]} has no effect without --checkpoint-activations",
            f"--checkpoint-activations {company}",
        )
        for flag, company in [
            ("--partition-activations", ""),
            ("--contiguous-checkpointing", "--partition-activations"),
            ("--checkpoint-in-cpu", "--partition-activations"),
            ("--synchronize-each-layer", ""),
            ("--profile-backward", ""),
            ("--checkpoint-num-layers 2", ""),
        ]
    ),
]


@pytest.mark.parametrize("name, words, message, remedy", BROKEN, ids=[row[1] for row in BROKEN])
def test_a_broken_rule_says_what_to_do(name: str, words: str, message: str, remedy: str | None) -> None:
    environ = CUDA if words.startswith("gpu") else CPU
    words = words.removeprefix("gpu")
    ranks = 8 if "parallel" in words else 1
    (printed,) = complaints(words, ranks=ranks, environ=environ)
    assert printed.startswith(message)
    if remedy:
        assert complaints(f"{words} {remedy}", ranks=ranks, environ=environ) == []


@pytest.mark.parametrize("name, words, message, remedy", WARNED, ids=[row[1] for row in WARNED])
def test_a_harmless_setting_is_a_warning(name: str, words: str, message: str, remedy: str) -> None:
    environ = CUDA if words.startswith("gpu") else CPU
    parsed, fixed = (read(line.removeprefix("gpu"), environ=environ) for line in (words, f"{words} {remedy}"))
    assert (parsed.problems, fixed.problems, fixed.warnings) == ([], [], [])
    assert len(parsed.warnings) == 1 and parsed.warnings[0].startswith(message)


@pytest.mark.parametrize("words", [words for _, words, *_ in BROKEN])
def test_rules_can_be_read_to_the_end(words: str) -> None:
    """A rule with more than one message raises no error while it is read to the end."""
    environ, ranks = CUDA if words.startswith("gpu") else CPU, 8 if "parallel" in words else 1
    run = read(words.removeprefix("gpu"), ranks=ranks, environ=environ).run
    assert any(list(rule.messages(run)) for rule in RULES)


def test_every_rule_is_tested_and_explained() -> None:
    errors = {name for name, *_ in BROKEN} | {
        "processes = TP x PP x CP x SP x DP",
        "BPE needs merges",
        "every batch size is a multiple of micro-batch x DP",
        "a tokenizer has a vocabulary",
        "a decoder has a sequence length",
        "--dry-run and --run-dir need the spec of the model",
        "--load-hf excludes --load",
        "--load-hf excludes --model-preset",
        "--load-hf needs the model of this program",
        "adapters belong to layers of this suite",
        "experts belong to layers of this suite",
    }
    warned = {name for name, *_ in WARNED} | {"--vocab-size is for NullTokenizer"}
    tested = errors | warned
    assert {rule.name for rule in RULES if not rule.only_warns} == errors
    assert {rule.name for rule in RULES if rule.only_warns} == warned
    assert len(tested) == len(RULES)
    assert all(rule.why.endswith(".") for rule in RULES)


def test_a_legal_run_breaks_no_rule() -> None:
    assert violations(parse()) == []


@pytest.mark.parametrize(
    "ranks, words, message",
    [
        (
            6,
            "--model-parallel-size 4",
            "6 processes cannot be split into --model-parallel-size 4: "
            "use 4 or 8 processes, or --model-parallel-size 1 or 2",
        ),
        (
            1,
            "--model-parallel-size 2 --pipe-parallel-size 2",
            "1 process cannot be split into --model-parallel-size 2 x --pipe-parallel-size 2: use 4 processes",
        ),
        (
            2,
            "--model-parallel-size 2 --pipe-parallel-size 2",
            "2 processes cannot be split into --model-parallel-size 2 x --pipe-parallel-size 2: "
            "use 4 processes, or --model-parallel-size 1, or --pipe-parallel-size 1",
        ),
        (
            6,
            "--model-parallel-size 2 --ds-sequence-parallel-size 2",
            "6 processes cannot be split into --model-parallel-size 2 x --ds-sequence-parallel-size 2: "
            "use 4 or 8 processes, or --model-parallel-size 1, or --ds-sequence-parallel-size 1",
        ),
    ],
)
def test_processes_that_cannot_be_split(ranks: int, words: str, message: str) -> None:
    assert complaints(words, ranks=ranks) == [message]


def test_merges_belong_to_bpe_only() -> None:
    words = SMALL.replace("--merge-file merges.txt", "").split()
    with pytest.raises(ConfigError, match="--merge-file is required with --tokenizer-type GPT2BPETokenizer"):
        parse_run(words, CPU)
    assert parse_run([*words, "--tokenizer-type", "WhitespaceTokenizer"], CPU).data.merge_file is None


def test_all_broken_rules_are_reported_at_once() -> None:
    words = "--model-parallel-size 3 --pipe-parallel-size 8 --zero-stage 3 --fp16 --checkpoint-in-cpu --dropout 1"
    assert len(complaints(f"{words} --hidden-dropout 1.5 --hidden-size 66 --unheard-of", ranks=8)) >= 9


def test_missing_values_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run([], CPU)
    assert {message.split()[0] for message in caught.value.messages} == {
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--lr",
        "--train-iters",
        "--batch-size",
        "--data-path",
        "--vocab-file",
        "--merge-file",
    }


@pytest.mark.parametrize("name", [name for name, field in flag_fields().items() if field.metadata["flag"]["within"]])
def test_values_out_of_range_are_refused(name: str) -> None:
    field = flag_fields()[name]
    interval = field.metadata["flag"]["within"]
    low, high = ends(interval)
    outside = low - 1 if interval[0] == "[" else low
    flag = "--" + (field.metadata["flag"]["name"] or name).replace("_", "-")
    environ = {**CUDA, "LOCAL_RANK": "0"}
    metadata = field.metadata["flag"]
    program = "bert" if metadata["masked_lm"] else "t5" if metadata["encoder_decoder"] == "only" else ""
    assert any(
        message.startswith(f"{flag} {outside:g} must be ")
        for message in complaints(f"{program} {flag} {outside:g}".strip(), environ=environ)
    )
    if interval.endswith(")") and high < float("inf"):
        assert not inside(high, interval) and inside((low + high) / 2, interval)


def test_messages_about_ranges() -> None:
    assert complaints("--hidden-dropout 1") == ["--hidden-dropout 1 must be from 0 to 1, 1 excluded"]
    assert complaints("--zero-stage 4") == ["--zero-stage 4 must be from 0 to 3"]
    assert complaints("--layernorm-epsilon 0") == ["--layernorm-epsilon 0 must be more than 0"]


@pytest.mark.parametrize(
    "environ, size, rank",
    [
        ({}, 1, None),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "3"}, 8, 3),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 4, 1),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, 2, 0),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0"}, 4, None),
        ({"SLURM_NTASKS": "4"}, 1, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 1, None),
    ],
)
def test_variables_of_launchers(environ: dict[str, str], size: int, rank: int | None) -> None:
    assert (world_size(environ), local_rank(environ)) == (size, rank)


@pytest.mark.parametrize("value", ["0", "-1", "two", ""])
def test_a_wrong_world_size_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"environment variable WORLD_SIZE={value}: set a whole number from 1 on"):
        parse_run(SMALL.split(), {**CPU, "WORLD_SIZE": value})


def test_the_device_is_detected_without_torch(tmp_path: Path) -> None:
    assert expected_device({}, tmp_path) == "cpu"
    (tmp_path / "nvidiactl").touch()  # a container may have it without a GPU
    assert expected_device({}, tmp_path) == "cpu"
    (tmp_path / "nvidia0").touch()
    assert expected_device({}, tmp_path) == "cuda"
    assert expected_device({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == "cuda"
    assert expected_device({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == "cpu"
    assert expected_device({"DS_ACCELERATOR": "cpu"}, tmp_path) == "cpu"


def test_nvidias_gpus_are_detected_under_wsl2(tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()  # also there with GPUs of other makers alone
    assert expected_device({}, tmp_path, [tmp_path]) == "cpu"
    (tmp_path / "libcuda.so.1").touch()
    assert expected_device({}, tmp_path, [tmp_path]) == "cuda"
    assert expected_device({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path, [tmp_path]) == "cpu"


@pytest.mark.parametrize("environ, backend", [(CPU, "gloo"), (CUDA, "nccl")])
def test_the_backend_follows_the_device(environ: dict[str, str], backend: str) -> None:
    assert parse(environ=environ).parallel.distributed_backend == backend
