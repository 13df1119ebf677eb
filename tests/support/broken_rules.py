"""Command lines that each break one rule: of the functions of megatron/cli/validation, and of each kind of metadata.

Below a command line stand the start of its message and what fixes it. A line of ``gpu`` is checked as on GPUs.
"""

_YARN = "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
Row = tuple[str, str, str]


def _rows(text: str) -> list[Row]:
    rows: list[list[str]] = []
    for line in text.replace("YARN", _YARN).strip().splitlines():
        if line.startswith(" "):
            rows[-1].append(line.strip())
        else:
            rows.append([line])
    return [(words, message, " ".join(remedy)) for words, message, *remedy in rows]


BROKEN = _rows("""
--hidden-size 66
    --hidden-size 66 is not a multiple
    --hidden-size 68
--model-parallel-size 8
    --num-attention-heads 4 is not a multiple of --model-parallel-size 8: use 8
    --num-attention-heads 8
--model-parallel-size 2 --ffn-hidden-size 33
    --ffn-hidden-size 33 is not a multiple of --model-parallel-size 2: use 32 or 34
    --ffn-hidden-size 34
--num-query-groups 3
    --num-attention-heads 4 is not a multiple of --num-query-groups 3: use 3 or 6
    --num-query-groups 2
--num-attention-heads 12 --hidden-size 48 --num-query-groups 3 --model-parallel-size 2
    --num-query-groups 3 and --model-parallel-size 2: neither is a multiple of the other; use
    --num-query-groups 6
--num-attention-heads 12 --hidden-size 48 --num-query-groups 3 --ds-sequence-parallel-size 4
    --ds-sequence-parallel-size 4 leaves 3 query groups to 4 ranks: neither is a multiple of the other
    --num-query-groups 4
--sequence-parallel --model-parallel-size 4 --seq-length 30
    --seq-length 30 is not a multiple of --sequence-parallel's --model-parallel-size 4: use 28 or 32
    --seq-length 28
--ds-sequence-parallel-size 2 --sequence-parallel --model-parallel-size 2 --seq-length 30
    --seq-length 30 is not a multiple of --ds-sequence-parallel-size 2 x --sequence-parallel's
    --seq-length 28
--ds-sequence-parallel-size 4 --model-parallel-size 2
    --num-attention-heads 4 is not a multiple of --ds-sequence-parallel-size 4 x --model-parallel-size
    --num-attention-heads 8
--context-parallel-size 8 --cp-comm-type a2a
    --num-attention-heads 4 is not a multiple of --context-parallel-size 8: use 8
    --cp-comm-type p2p
--context-parallel-size 4 --seq-length 36
    --seq-length 36 is not a multiple of 2 x --context-parallel-size 4: use 32 or 40
    --seq-length 32
--context-parallel-size 4 --cp-comm-type a2a+p2p
    --cp-comm-type a2a+p2p needs two sizes whose product is --context-parallel-size 4: use
    --hierarchical-context-parallel-sizes 2 2
--max-position-embeddings 16
    --seq-length 32 is more than --max-position-embeddings 16
    --seq-length 16
--pipe-parallel-size 8
    --num-layers 4 is less than
    --num-layers 8
--pipe-parallel-size 4 --pipeline-schedule dualpipev --gas 8
    --num-layers 4 is less than the two model chunks per stage of --pipe-parallel-size 4
    --num-layers 8
--pipe-parallel-size 8 --pipeline-partition uniform
    --pipeline-partition uniform has 5 parts to distribute, less than --pipe-parallel-size 8: use at
    --num-layers 7
--pipe-parallel-size 2 --pipeline-partition profile
    --pipeline-partition profile: choose from uniform, parameters, flops, type:REG
--pipe-parallel-size 2 --pipeline-partition type:(
    --pipeline-partition type:(: that is no regular expression
--pipe-parallel-size 2 --pipeline-partition type:Mamba
    --pipeline-partition type:Mamba matches no layer: the layers are WordEmbedding,
--pipe-parallel-size 2 --pipeline-partition 4
    --pipeline-partition 4: give 2 numbers, one for each stage of
    --pipe-parallel-size 1
--pipe-parallel-size 2 --pipeline-partition 1,2
    --pipeline-partition 1,2 totals 3 layers, and --num-layers is 4
    --num-layers 3
--pipe-parallel-size 4 --pipeline-partition 2,0,1,1
    --pipeline-partition 2,0,1,1 leaves a middle stage empty
--pipe-parallel-size 2 --pipeline-partition 2,2 --pipeline-schedule dualpipev --gas 4
    --pipeline-partition 2,2: give 4 numbers, two for each stage of --pipeline-schedule dualpipev
    --pipeline-partition 0,2,2,0
--pipe-parallel-size 2 --pipeline-partition 0,4 --zero-stage 1
    --pipeline-partition 0,4 leaves the first stage with the embeddings only, which works in fp32 at
    --pipeline-partition 1,3
--pipe-parallel-size 2 --pipeline-schedule dualpipev --gas 3
    --pipeline-schedule dualpipev with --pipe-parallel-size 2 needs 4 micro-batches or more, and there
    --gas 4
--pipe-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --gas 3
    --pipeline-schedule interleaved with --pipe-parallel-size 2 needs a multiple of 2 micro-batches,
    --gas 4
--lora-rank 4 --pipe-parallel-size 1 --pipeline-partition parameters
    --pipeline-partition parameters may leave a stage without a transformer layer, and so without an
    --pipeline-partition 4
--pipe-parallel-size 1 --zero-stage 2
    --zero-stage 2 cannot be combined with --pipe-parallel-size 1: the pipeline accumulates gradients
    --zero-stage 1
--fp16
    --fp16 does not work on the CPU: use --bf16
--initial-loss-scale 1000
    --initial-loss-scale 1000 is not a power of two: use 1024
    --initial-loss-scale 1024
--min-scale 1.5
    --min-scale 1.5 is not a whole
    --min-scale 2
--zero-coalesce-grad-reduction --zero-stage 3 --bf16 --grad-accum-dtype fp32
    --zero-coalesce-grad-reduction and --grad-accum-dtype fp32 exclude each other: gradients are added up in
    --grad-accum-dtype bf16
--tiled-mlp --lora-rank 2 --lora-dropout 0.1
    --tiled-mlp and --lora-dropout 0.1 exclude each other: remove one
    --lora-target dense
YARN --yarn-beta-fast 1
    --yarn-beta-fast 1 is no more than --yarn-beta-slow 1
    --yarn-beta-fast 2
YARN --rotary-base 1
    --position-embedding-type yarn needs waves that become
    --rotary-base 2
--position-embedding-type rope --rotary-percent 0.2
    --rotary-percent 0.2 of heads of 16 rotates 3 dimensions, which is no even number
    --rotary-percent 0.25
--lora-rank 4 --lora-target q_proj
    --lora-target q_proj needs all of q_proj k_proj v_proj
    --lora-target q_proj k_proj v_proj
--lora-rank 4 --lora-target embedding
    --lora-target embedding is unknown: choose from query_key_value dense dense_h_to_4h dense_4h_to_h
    --lora-target dense
--fused-kernels apex
    --fused-kernels apex needs CUDA
    --fused-kernels auto
--scaled-upper-triang-masked-softmax-fusion --pre-tokens 30
    --scaled-upper-triang-masked-softmax-fusion cannot be combined with --pre-tokens 30
--gradient-accumulation-fusion --gas 2 --zero-stage 1 --bf16 --grad-accum-dtype fp32
    --gradient-accumulation-fusion and --grad-accum-dtype fp32 exclude each other: gradients are added up in
    --grad-accum-dtype bf16
--distributed-backend nccl
    --distributed-backend nccl needs CUDA, and this run is on cpu: remove it
    --distributed-backend gloo
--watchdog-minutes 30
    --watchdog-minutes 30 is too late for collectives that time out after 30 minutes
    --watchdog-minutes 30 --distributed-timeout-minutes 30.5
--optimizer adafactor --zero-stage 1
    --optimizer adafactor needs full matrices on each rank: use --zero-stage 0, or --optimizer adam
    --zero-stage 0
--min-lr 1
    --min-lr 1 is more than --lr 0.001
    --lr 1
--lr-warmup-iters 101
    the warm-up of 101 iterations is longer than the decay of 100
    --train-iters 101
--lr-decay-style WSD --lr-wsd-decay-iters 90 --warmup 0.2
    the warm-up of 20 iterations and --lr-wsd-decay-iters 90 do not fit into 100
    --warmup 0.1
--num-experts 4 --moe-router-topk 5
    --moe-router-topk 5 is more than --num-experts 4: lower it
    --moe-router-topk 4
--num-experts 4 --moe-layer-freq [0]+[1]*2
    --moe-layer-freq [0]*1+[1]*2 is of 3 layers, not of --num-layers 4: give one each
    --moe-layer-freq ([0]+[1])*2
--num-experts 4 --moe-layer-freq [0]*4
    --moe-layer-freq [0]*4 leaves no layer with experts: write 1 for some
    --moe-layer-freq [0]*3+[1]
--num-experts 4 --model-parallel-size 4 --moe-ffn-hidden-size 6
    --moe-ffn-hidden-size 6 is not a multiple of --model-parallel-size 4: use 4 or 8
    --moe-ffn-hidden-size 8
--num-experts 4 --model-parallel-size 2 --expert-tensor-parallel-size 1
    --expert-tensor-parallel-size 1 differs from --model-parallel-size 2: use 2
    --expert-tensor-parallel-size 2
--num-experts 6 --expert-model-parallel-size 4
    --num-experts 6 is not a multiple of --expert-model-parallel-size 4: use 4 or 8
    --num-experts 8
--num-experts 12 --expert-model-parallel-size 3
    --expert-model-parallel-size 3 does not divide the data-parallel size 8: use a divisor of it, or
    --expert-model-parallel-size 4
--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 2 --moe-layer-freq 4
    --pipeline-partition type:ParallelTransformerLayer leaves stage 1 without a layer with experts
    --moe-layer-freq 3
--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 4 --num-layers 3 --pipeline-partition uniform
    --pipeline-partition uniform leaves stage 3 without a layer with experts (--moe-layer-freq 1):
    --num-layers 8
--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 2 --pipeline-partition parameters
    --pipeline-partition parameters may leave a stage without a layer with experts: remove it, or give
    --pipeline-partition 3,1
--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 2 --pipeline-partition 4,0
    --pipeline-partition 4,0 leaves stage 1 without a layer with experts (--moe-layer-freq 1): divide
    --pipeline-partition 3,1
--tokenizer-type BertWordPieceCase
    --tokenizer-type BertWordPieceCase does not suit GPT-2: use GPT2BPETokenizer or WhitespaceTokenizer
    --tokenizer-type WhitespaceTokenizer
bert --tokenizer-type WhitespaceTokenizer
    --tokenizer-type WhitespaceTokenizer does not suit BERT: use BertWordPieceLowerCase or
    --tokenizer-type BertWordPieceCase
bert --seq-length 4
    --seq-length 4 is too short for [CLS]
    --seq-length 5
--data-path 0.3 one 0.7
    --data-path 0.3 one 0.7: 3 words: give one prefix, or WEIGHT PREFIX for each data set
    --data-path 0.3 one 0.7 other
t5 --pipe-parallel-size 2 --pipeline-model-parallel-split-rank 2
    --pipeline-model-parallel-split-rank 2 is no stage between the first and
    --pipeline-model-parallel-split-rank 1
t5 --pipeline-model-parallel-split-rank 1
    --pipeline-model-parallel-split-rank 1 needs a pipeline: add --pipe-parallel-size, 2 or
    --pipe-parallel-size 2
t5 --pipe-parallel-size 8 --decoder-num-layers 8 --pipeline-model-parallel-split-rank 5
    --pipeline-model-parallel-split-rank 5 gives 5 stages to the encoder of 4 layers: lower it
    --pipeline-model-parallel-split-rank 4
t5 --pipe-parallel-size 8 --num-layers 8 --pipeline-model-parallel-split-rank 1
    --pipeline-model-parallel-split-rank 1 gives 7 stages to the decoder of 3 layers: raise it
    --pipeline-model-parallel-split-rank 5
t5 --pipe-parallel-size 2 --pipeline-partition 4,3 --pipeline-model-parallel-split-rank 1
    --pipeline-model-parallel-split-rank 1 and --pipeline-partition 4,3 exclude each other: give one
    --pipeline-partition uniform
t5 --pipe-parallel-size 2 --pipeline-schedule zbv --pipeline-model-parallel-split-rank 1
    --pipeline-model-parallel-split-rank 1 divides stages, and with --pipeline-schedule zbv each has
    --pipeline-schedule zbh1
t5 --model-parallel-size 2 --sequence-parallel
    --sequence-parallel cannot be combined with a model that has an encoder and a decoder: remove it
t5 --position-embedding-type learned_absolute --max-position-embeddings 32 --decoder-seq-length 64
    --decoder-seq-length 64 is more than --max-position-embeddings 32: raise the latter
    --max-position-embeddings 64
t5 --position-embedding-type rope
    --position-embedding-type rope does not suit T5: use relative, learned_absolute or none
    --position-embedding-type none
--position-embedding-type relative
    --position-embedding-type relative does not suit GPT-2: use learned_absolute, rope or none
    --position-embedding-type rope
t5 --relative-attention-num-buckets 9
    --relative-attention-num-buckets 9 must be even, and half of it less than
    --relative-attention-num-buckets 10
--trace out --trace-steps 4:2
    --trace-steps 4:2: give the first iteration and the last, such as 2:4
    --trace-steps 2:4
--trace out --profile-steps 0:2
    --profile-steps 0:2: give the first iteration and the last, such as 2:4
    --profile-steps 1:2
--trace out --profile-steps 101:102
    --profile-steps 101:102 begins after the last iteration, 100: choose earlier ones
    --train-iters 101
--trace out --flops-profile-step 101
    --flops-profile-step 101 is after the last iteration, 100: choose another
    --flops-profile-step 100
--dry-run --rank 0,5
    --rank 5: there is 1 process, counted from 0
    --world-size 6
--dry-run --rank 0-5
    --rank 0-5 is not a list of numbers
    --rank 0
--async-save
    --async-save needs --save: add it, or remove --async-save
    --save out
--offload-optimizer nvme --nvme-path d --zero-stage 1
    --offload-optimizer nvme needs --zero-stage 3: add it, or remove
    --zero-stage 3
--no-offload-pin-memory --zero-stage 3
    --no-offload-pin-memory needs --offload-optimizer or --offload-param: add it
    --offload-param cpu
--num-experts 4 --moe-router-topk 1
    --moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over one logit is 1
    --moe-router-pre-softmax
--moe-router-topk 1
    --moe-router-topk needs --num-experts: add it
    --num-experts 4 --moe-router-topk 2
--swiglu --openai-gelu
    --swiglu and --openai-gelu exclude each other: remove one
gpu --fp16 --bf16
    --fp16 and --bf16 exclude each other: weights have one type; remove one
--optimizer muon --zero-stage 3
    --optimizer muon and --zero-stage 3 exclude each other: it needs full matrices
    --zero-stage 2
""")
WARNED = _rows("""
--tokenizer-type WhitespaceTokenizer
    --merge-file merges.txt is not used: WhitespaceTokenizer has no merges
    --tokenizer-type GPT2BPETokenizer
--save-interval 5
    --save-interval has no effect without --save: add it, or remove --save-interval
    --save out
--checkpoint-in-cpu
    --checkpoint-in-cpu has no effect without --checkpoint-activations
    --checkpoint-activations --partition-activations
--accumulate-allreduce-grads-in-fp32
    --grad-accum-dtype fp32 has no effect without --bf16 or --fp16
    --bf16
""")
