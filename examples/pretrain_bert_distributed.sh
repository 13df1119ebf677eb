#!/usr/bin/env bash
# Pretrain BERT (336M) under torchrun: started once on each host, without ssh.
#
#   bash examples/pretrain_bert_distributed.sh --seed 7     on this host's 8 GPUs, with a further flag
#   NODES=2 NODE_RANK=0 MASTER_ADDR=HOST bash examples/pretrain_bert_distributed.sh     on HOST; NODE_RANK=1 on the other host
#   DS_ACCELERATOR=cpu GPUS=2 LAYERS=4 HIDDEN=128 SEQ_LENGTH=128 bash examples/pretrain_bert_distributed.sh
#
# With --deepspeed_config FILE, the settings in the file must agree with this script.
set -euo pipefail

# Data, as tools/preprocess_data.py --split-sentences writes it, and checkpoints: a run resumes from its own.
DATA=${DATA:-data/corpus_text_sentence}
VOCAB=${VOCAB:-data/vocab.txt}
TOKENIZER=${TOKENIZER:-BertWordPieceLowerCase} # or BertWordPieceCase
SAVE=${SAVE:-checkpoints/bert_336m_torchrun}
SAVE_INTERVAL=${SAVE_INTERVAL:-5000}

# Model.
LAYERS=${LAYERS:-24}
HIDDEN=${HIDDEN:-1024}
HEADS=${HEADS:-16}
SEQ_LENGTH=${SEQ_LENGTH:-512}

# Training. Batch sizes are in samples; the number of micro-batches follows from the global batch.
MICRO_BATCH=${MICRO_BATCH:-4}
GLOBAL_BATCH=${GLOBAL_BATCH:-64}
ITERATIONS=${ITERATIONS:-1000000}
LR=${LR:-1e-4}
MIN_LR=${MIN_LR:-1e-5}
PRECISION=${PRECISION:-$([ "${DS_ACCELERATOR:-}" = cpu ] && echo fp32 || echo fp16)} # fp32, bf16 or fp16

# Hosts. GPUS is the number of processes per host, also on CPUs.
GPUS=${GPUS:-8}
NODES=${NODES:-1}
NODE_RANK=${NODE_RANK:-0}             # number of this host
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} # address of host 0
MASTER_PORT=${MASTER_PORT:-29500}
TP=${TP:-1}                 # tensor-parallel size
PP=${PP:-0}                 # pipeline stages, 0: no pipeline; processes / (TP x PP) is the data-parallel size
ZERO_STAGE=${ZERO_STAGE:-1} # 0 or 1 with a pipeline

# Activation checkpointing: 1 is on, 0 is off. Partitioning requires TP > 1.
CHECKPOINT_ACTIVATIONS=${CHECKPOINT_ACTIVATIONS:-1}
PARTITION_ACTIVATIONS=${PARTITION_ACTIVATIONS:-0}

# DRY_RUN=1 prints the command instead of running it.
# shellcheck disable=SC1091
source "$(dirname "$0")/../tools/dry_run.sh"
check_numbers 1 GPUS NODES TP MASTER_PORT
check_numbers 0 NODE_RANK PP ZERO_STAGE
((NODE_RANK < NODES)) || fail "NODE_RANK is $NODE_RANK: give this host's number, from 0 to $((NODES - 1))"
SWITCHES=()
switch "$CHECKPOINT_ACTIVATIONS" --checkpoint-activations
switch "$PARTITION_ACTIVATIONS" --partition-activations
if [ "$PRECISION" != fp32 ]; then SWITCHES+=("--$PRECISION"); fi

# The processes of a host divide its cores. torchrun would set 1, with a warning.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES = $(nproc) / GPUS, CORES ? CORES : 1))}

run torchrun --nnodes "$NODES" --node_rank "$NODE_RANK" --nproc_per_node "$GPUS" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$(realpath "$(dirname "$0")/../pretrain_bert.py")" \
    --model-parallel-size "$TP" --pipe-parallel-size "$PP" \
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS" \
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" \
    --batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$ITERATIONS" \
    --lr "$LR" --min-lr "$MIN_LR" --lr-decay-style linear --warmup 0.01 --weight-decay 0.01 --clip-grad 1.0 \
    --zero-stage "$ZERO_STAGE" "${SWITCHES[@]}" \
    --data-path "$DATA" --vocab-file "$VOCAB" --tokenizer-type "$TOKENIZER" --split 949,50,1 \
    --save "$SAVE" --load "$SAVE" --save-interval "$SAVE_INTERVAL" \
    --eval-interval 1000 --eval-iters 10 "$@"
