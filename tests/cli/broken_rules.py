"""Command lines that each break one rule: of the functions of megatron/cli/validation, and of each kind of metadata.

Below a command line stands what fixes it, if flags can. A line of ``gpu`` is checked as on GPUs.
"""

_YARN = "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
Row = tuple[str, str]


def _rows(text: str) -> list[Row]:
    rows: list[list[str]] = []
    for line in text.replace("YARN", _YARN).strip().splitlines():
        if line.startswith(" "):
            rows[-1].append(line.strip())
        else:
            rows.append([line])
    return [(words, " ".join(remedy)) for words, *remedy in rows]


BROKEN = _rows("""
--hidden-size 66
    --hidden-size 68
--model-parallel-size 8
    --num-attention-heads 8
--model-parallel-size 2 --ffn-hidden-size 33
    --ffn-hidden-size 34
--num-query-groups 3
    --num-query-groups 2
--num-attention-heads 12 --hidden-size 48 --num-query-groups 3 --model-parallel-size 2
    --num-query-groups 6
--num-query-groups 1 --model-parallel-size 4 --kv-channels 3
    --kv-channels 4
--num-attention-heads 12 --hidden-size 48 --num-query-groups 3 --ds-sequence-parallel-size 4
    --num-query-groups 4
--sequence-parallel --model-parallel-size 4 --seq-length 30
    --seq-length 28
--ds-sequence-parallel-size 2 --sequence-parallel --model-parallel-size 2 --seq-length 30
    --seq-length 28
--context-parallel-size 4 --seq-length 36
    --seq-length 32
--context-parallel-size 4 --cp-comm-type a2a+p2p
    --hierarchical-context-parallel-sizes 2 2
--max-position-embeddings 16
    --seq-length 16
--pipe-parallel-size 8
    --num-layers 8
--pipe-parallel-size 4 --pipeline-schedule dualpipev --gas 8
    --num-layers 8
--pipe-parallel-size 8 --pipeline-partition uniform
    --num-layers 7
--pipe-parallel-size 2 --pipeline-partition profile
--pipe-parallel-size 2 --pipeline-partition type:(
--pipe-parallel-size 2 --pipeline-partition type:(P|a+)+x
--pipe-parallel-size 2 --pipeline-partition type:Mamba
--pipe-parallel-size 2 --pipeline-partition 1,2
    --num-layers 3
--pipe-parallel-size 4 --pipeline-partition 2,0,1,1
--pipe-parallel-size 2 --pipeline-partition 2,2 --pipeline-schedule dualpipev --gas 4
    --pipeline-partition 0,2,2,0
--pipe-parallel-size 2 --pipeline-partition 0,4 --zero-stage 1
    --pipeline-partition 1,3
--pipe-parallel-size 2 --pipeline-schedule dualpipev --gas 3
    --gas 4
--pipe-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --gas 3
    --gas 4
--pipe-parallel-size 2 --gas 4 --num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2
--pipe-parallel-size 2 --gas 4 --num-layers-per-virtual-pipeline-stage 1 --pipeline-partition 2,2
--pipe-parallel-size 1 --zero-stage 2
    --zero-stage 1
--fp16
--initial-loss-scale 1000
    --initial-loss-scale 1024
--min-scale 1.5
    --min-scale 2
--tiled-mlp --lora-rank 2 --lora-dropout 0.1
    --lora-target dense
YARN --yarn-beta-fast 1
    --yarn-beta-fast 2
YARN --rotary-base 1
    --rotary-base 2
--position-embedding-type rope --rotary-percent 0.2
    --rotary-percent 0.25
--lora-rank 4 --lora-target q_proj
    --lora-target q_proj k_proj v_proj
--lora-rank 4 --lora-target embedding
    --lora-target dense
--distributed-backend nccl
    --distributed-backend gloo
--watchdog-minutes 30
    --watchdog-minutes 30 --distributed-timeout-minutes 30.5
--optimizer adafactor --zero-stage 1
    --zero-stage 0
--min-lr 1
    --lr 1
--lr-warmup-iters 101
    --train-iters 101
--lr-decay-style WSD --lr-wsd-decay-iters 90 --warmup 0.2
    --warmup 0.1
--num-experts 4 --moe-router-topk 5
    --moe-router-topk 4
--num-experts 4 --moe-layer-freq [0]+[1]*2
    --moe-layer-freq ([0]+[1])*2
--num-experts 4 --moe-layer-freq [0]*4
    --moe-layer-freq [0]*3+[1]
--num-experts 6 --expert-model-parallel-size 4
    --num-experts 8
--num-experts 12 --expert-model-parallel-size 3
    --expert-model-parallel-size 4
--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 2 --moe-layer-freq 4
    --moe-layer-freq 3
--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 4 --num-layers 3 --pipeline-partition uniform
    --num-layers 8
--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 2 --pipeline-partition parameters
    --pipeline-partition 3,1
bert --tokenizer-type WhitespaceTokenizer
    --tokenizer-type BertWordPieceCase
bert --seq-length 4
    --seq-length 5
--data-path 0.3 one 0.7
    --data-path 0.3 one 0.7 other
t5 --pipe-parallel-size 2 --pipeline-model-parallel-split-rank 2
    --pipeline-model-parallel-split-rank 1
t5 --pipe-parallel-size 8 --decoder-num-layers 8 --pipeline-model-parallel-split-rank 5
    --pipeline-model-parallel-split-rank 4
t5 --pipe-parallel-size 8 --num-layers 8 --pipeline-model-parallel-split-rank 1
    --pipeline-model-parallel-split-rank 5
t5 --pipe-parallel-size 2 --pipeline-partition 4,3 --pipeline-model-parallel-split-rank 1
    --pipeline-partition uniform
t5 --position-embedding-type learned_absolute --max-position-embeddings 32 --decoder-seq-length 64
    --max-position-embeddings 64
llava --vision-feature-layer 4
    --vision-feature-layer 3
llava --vision-feature-layer -5
    --vision-feature-layer -1
llava --model-parallel-size 2 --vision-num-attention-heads 1
    --vision-num-attention-heads 2
llava --vision-image-size 84
    --seq-length 40
llava --vision-patch-size 0
    --vision-patch-size 14
llava --freeze-vision --pipe-parallel-size 2 --pipeline-partition 2,4
    --pipeline-partition 4,2
--position-embedding-type relative
    --position-embedding-type rope
t5 --relative-attention-num-buckets 9
    --relative-attention-num-buckets 10
--trace out --profile-steps 0:2
    --profile-steps 1:2
--trace out --profile-steps 101:102
    --train-iters 101
--trace out --flops-profile-step 101
    --flops-profile-step 100
--dry-run --rank 0,5
    --world-size 6
--dry-run --rank 0-5
    --rank 0
--moe-router-topk 1
    --num-experts 4 --moe-router-topk 2
--optimizer muon --zero-stage 3
    --zero-stage 2
--compile --zero-stage 3 --reset-attention-mask
    --zero-stage 2
""")
WARNED = _rows("""
--tokenizer-type WhitespaceTokenizer
    --tokenizer-type GPT2BPETokenizer
--save-interval 5
    --save out
--checkpoint-in-cpu
    --checkpoint-activations --partition-activations
--accumulate-allreduce-grads-in-fp32
    --bf16
--zero-stage 1 --tiled-mlp --overlap-grad-reduce
    --zero-stage 3
--zero-stage 1 --offload-optimizer cpu --pipe-parallel-size 1 --overlap-grad-reduce
    --pipe-parallel-size 0
--zero-stage 1 --offload-optimizer cpu --overlap-param-gather
    --offload-optimizer none
""")
