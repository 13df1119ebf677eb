#!/usr/bin/env bash
# Pretrain GPT-2 (345M) with DeepSpeed: tensor and data parallel, any ZeRO stage; with PP also a pipeline.
#
#   bash examples/ds_pretrain_gpt2.sh                                 on this host's 8 GPUs
#   ZERO_STAGE=3 GPUS=4 bash examples/ds_pretrain_gpt2.sh --seed 7    other settings, and a further flag
#   DS_ACCELERATOR=cpu GPUS=2 LAYERS=4 HIDDEN=128 SEQ_LENGTH=128 bash examples/ds_pretrain_gpt2.sh
#
# Data, model and training are set in tools/gpt2_345m.sh. With --deepspeed_config FILE, the settings in the file must
# agree with the scripts. DRY_RUN=1 prints the command instead of running it.
set -euo pipefail
# shellcheck source=tools/gpt2_345m.sh
source "$(dirname "$0")/../tools/gpt2_345m.sh"

SAVE=${SAVE:-checkpoints/gpt2_345m_zero} # checkpoints: a run resumes from its own

# Hosts. GPUS is the number of processes per host, also on CPUs. Without a hostfile only this host is used.
GPUS=${GPUS:-8}
HOSTFILE=${HOSTFILE:-} # see hostfile.example
NODES=${NODES:-}       # number of hosts of the hostfile to use; empty: all
MASTER_PORT=${MASTER_PORT:-29500}
TP=${TP:-1} # tensor-parallel size
PP=${PP:-0} # pipeline stages, 0: none; the number of processes / (TP x PP) is the data-parallel size

# ZeRO: 0 or 1 with a pipeline. Bucket sizes are in elements. Here and below, 1 is on and 0 is off.
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

check_numbers 1 GPUS TP MASTER_PORT ${NODES:+NODES}
check_numbers 0 PP ZERO_STAGE
if [ -n "$NODES" ] && [ -z "$HOSTFILE" ]; then fail "NODES requires HOSTFILE, which lists the hosts"; fi
switch "$CONTIGUOUS_GRADIENTS" --zero-contiguous-gradients --no-zero-contiguous-gradients
switch "$REDUCE_SCATTER" --zero-reduce-scatter --no-zero-reduce-scatter
switch "$CPU_OPTIMIZER" --cpu-optimizer
switch "$CHECKPOINT_ACTIVATIONS" --checkpoint-activations
switch "$PARTITION_ACTIVATIONS" --partition-activations
switch "$CONTIGUOUS_CHECKPOINTING" --contiguous-checkpointing
switch "$CHECKPOINT_IN_CPU" --checkpoint-in-cpu
switch "$SYNCHRONIZE_EACH_LAYER" --synchronize-each-layer
switch "$PROFILE_BACKWARD" --profile-backward

HERE=$(realpath "$(dirname "$0")/..")
START=(deepspeed --log_level critical)
if [ -n "$HOSTFILE" ]; then
    START=(python "$HERE/tools/launch.py" --hostfile "$HOSTFILE" ${NODES:+--num_nodes "$NODES"})
fi

arguments --load "$SAVE" --zero-reduce-bucket-size "$REDUCE_BUCKET" --zero-allgather-bucket-size "$ALLGATHER_BUCKET" \
    --checkpoint-num-layers "$CHECKPOINT_LAYERS" "$@"
run "${START[@]}" --num_gpus "$GPUS" --master_port "$MASTER_PORT" "$HERE/pretrain_gpt2.py" "${ARGUMENTS[@]}"
