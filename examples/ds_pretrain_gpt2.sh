#!/usr/bin/env bash
# Pretrain GPT-2 (345M) on DeepSpeed's plain engine: tensor and data parallel, any ZeRO stage.
#
#   bash examples/ds_pretrain_gpt2.sh                                 on this host's 8 GPUs
#   ZERO_STAGE=3 GPUS=4 bash examples/ds_pretrain_gpt2.sh --seed 7    other settings, and a further flag
#   DS_ACCELERATOR=cpu GPUS=2 LAYERS=4 HIDDEN=128 SEQ_LENGTH=128 bash examples/ds_pretrain_gpt2.sh
#
# With --deepspeed_config FILE, the settings in the file must agree with those of this script.
set -euo pipefail

# Data, as tools/preprocess_data.py writes it (PREFIX.bin and .idx), and checkpoints: a run resumes from its own.
DATA=${DATA:-data/corpus_text_document}
VOCAB=${VOCAB:-data/vocab.json}
MERGES=${MERGES-data/merges.txt} # empty for --tokenizer-type WhitespaceTokenizer, which has no merges
SAVE=${SAVE:-checkpoints/gpt2_345m_zero}
SAVE_INTERVAL=${SAVE_INTERVAL:-5000}

# Model.
LAYERS=${LAYERS:-24}
HIDDEN=${HIDDEN:-1024}
HEADS=${HEADS:-16}
SEQ_LENGTH=${SEQ_LENGTH:-1024}

# Training. Batch sizes are in samples; the number of micro-batches follows from the global batch.
MICRO_BATCH=${MICRO_BATCH:-4}
GLOBAL_BATCH=${GLOBAL_BATCH:-64}
ITERATIONS=${ITERATIONS:-320000}
LR=${LR:-1.5e-4}
MIN_LR=${MIN_LR:-1e-5}
PRECISION=${PRECISION:-$([ "${DS_ACCELERATOR:-}" = cpu ] && echo fp32 || echo fp16)} # fp32, bf16 or fp16

# Hosts. GPUS is the number of processes per host, also on CPUs. Without a hostfile only this host is used.
GPUS=${GPUS:-8}
HOSTFILE=${HOSTFILE:-} # see hostfile.example
NODES=${NODES:-}       # number of hosts of the hostfile to use; empty: all
MASTER_PORT=${MASTER_PORT:-29500}
TP=${TP:-1} # tensor-parallel size; the remaining processes are data parallel

# ZeRO. Bucket sizes are in elements. Here and below, 1 is on and 0 is off.
ZERO_STAGE=${ZERO_STAGE:-2}
REDUCE_BUCKET=${REDUCE_BUCKET:-5e7}
ALLGATHER_BUCKET=${ALLGATHER_BUCKET:-5e8}
CONTIGUOUS_GRADIENTS=${CONTIGUOUS_GRADIENTS:-1}
REDUCE_SCATTER=${REDUCE_SCATTER:-1}
CPU_OPTIMIZER=${CPU_OPTIMIZER:-0}

# Activation checkpointing. The other settings require the first; contiguous and in CPU require partitioned, which
# requires TP > 1.
CHECKPOINT_ACTIVATIONS=${CHECKPOINT_ACTIVATIONS:-1}
CHECKPOINT_LAYERS=${CHECKPOINT_LAYERS:-1} # layers recomputed together
PARTITION_ACTIVATIONS=${PARTITION_ACTIVATIONS:-0}
CONTIGUOUS_CHECKPOINTING=${CONTIGUOUS_CHECKPOINTING:-0}
CHECKPOINT_IN_CPU=${CHECKPOINT_IN_CPU:-0}
SYNCHRONIZE_EACH_LAYER=${SYNCHRONIZE_EACH_LAYER:-0}
PROFILE_BACKWARD=${PROFILE_BACKWARD:-0}

SWITCHES=()
switch() { if (($1)); then SWITCHES+=("$2"); else SWITCHES+=("${@:3}"); fi; } # setting, flag for 1, flag for 0
switch "$CONTIGUOUS_GRADIENTS" --zero-contiguous-gradients --no-zero-contiguous-gradients
switch "$REDUCE_SCATTER" --zero-reduce-scatter --no-zero-reduce-scatter
switch "$CPU_OPTIMIZER" --cpu-optimizer
switch "$CHECKPOINT_ACTIVATIONS" --checkpoint-activations
switch "$PARTITION_ACTIVATIONS" --partition-activations
switch "$CONTIGUOUS_CHECKPOINTING" --contiguous-checkpointing
switch "$CHECKPOINT_IN_CPU" --checkpoint-in-cpu
switch "$SYNCHRONIZE_EACH_LAYER" --synchronize-each-layer
switch "$PROFILE_BACKWARD" --profile-backward
if [ "$PRECISION" != fp32 ]; then SWITCHES+=("--$PRECISION"); fi

# A rank that was killed is reported by the others, where there are any.
LOG_LEVEL=$([ "$GPUS" = 1 ] && echo error || echo critical)
HOSTS=(--log_level "$LOG_LEVEL" --num_gpus "$GPUS" --master_port "$MASTER_PORT")
if [ -n "$HOSTFILE" ]; then HOSTS+=(--log_level warning --hostfile "$HOSTFILE" ${NODES:+--num_nodes "$NODES"}); fi

# DRY_RUN=1 prints the command instead of running it.
# shellcheck disable=SC1091
source "$(dirname "$0")/../tools/dry_run.sh"
run deepspeed "${HOSTS[@]}" "$(realpath "$(dirname "$0")/../pretrain_gpt2.py")" \
    --model-parallel-size "$TP" \
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS" \
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" \
    --batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$ITERATIONS" \
    --lr "$LR" --min-lr "$MIN_LR" --lr-decay-style cosine --warmup 0.01 --weight-decay 0.01 --clip-grad 1.0 \
    --zero-stage "$ZERO_STAGE" \
    --zero-reduce-bucket-size "$REDUCE_BUCKET" --zero-allgather-bucket-size "$ALLGATHER_BUCKET" \
    --checkpoint-num-layers "$CHECKPOINT_LAYERS" "${SWITCHES[@]}" \
    --data-path "$DATA" --vocab-file "$VOCAB" ${MERGES:+--merge-file "$MERGES"} --split 949,50,1 \
    --save "$SAVE" --load "$SAVE" --save-interval "$SAVE_INTERVAL" \
    --eval-interval 1000 --eval-iters 10 "$@"
