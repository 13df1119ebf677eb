#!/usr/bin/env bash
# Pretrain GPT-2 (345M) under torchrun: started once on each host, without ssh.
#
#   bash examples/pretrain_gpt2_distributed.sh --seed 7     on this host's 8 GPUs, with a further flag
#   NODES=2 NODE_RANK=0 MASTER_ADDR=HOST bash examples/pretrain_gpt2_distributed.sh     on HOST; NODE_RANK=1 on the other host
#   DS_ACCELERATOR=cpu GPUS=2 LAYERS=4 HIDDEN=128 SEQ_LENGTH=128 bash examples/pretrain_gpt2_distributed.sh
#
# Data, model and training are set in tools/gpt2_345m.sh. With --deepspeed_config FILE, the settings in the file must
# agree with the scripts. DRY_RUN=1 prints the command instead of running it.
set -euo pipefail
# shellcheck source=tools/gpt2_345m.sh
source "$(dirname "$0")/../tools/gpt2_345m.sh"

SAVE=${SAVE:-checkpoints/gpt2_345m_torchrun} # checkpoints: a run resumes from its own

# Hosts. GPUS is the number of processes per host, also on CPUs.
GPUS=${GPUS:-8}
NODES=${NODES:-1}
NODE_RANK=${NODE_RANK:-0}             # number of this host
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} # address of host 0
MASTER_PORT=${MASTER_PORT:-29500}
TP=${TP:-1}                 # tensor-parallel size
PP=${PP:-0}                 # pipeline stages, 0: none; processes / (TP x PP) is the data-parallel size
ZERO_STAGE=${ZERO_STAGE:-1} # 0 or 1 with a pipeline

# Activation checkpointing: 1 is on, 0 is off. Partitioning requires TP > 1.
CHECKPOINT_ACTIVATIONS=${CHECKPOINT_ACTIVATIONS:-1}
PARTITION_ACTIVATIONS=${PARTITION_ACTIVATIONS:-0}
check_numbers 1 GPUS NODES TP MASTER_PORT
check_numbers 0 NODE_RANK PP ZERO_STAGE
((NODE_RANK < NODES)) || fail "NODE_RANK is $NODE_RANK: give this host's number, from 0 to $((NODES - 1))"
switch "$CHECKPOINT_ACTIVATIONS" --checkpoint-activations
switch "$PARTITION_ACTIVATIONS" --partition-activations

# The processes of a host divide its cores. torchrun would set 1, with a warning.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES = $(nproc) / GPUS, CORES ? CORES : 1))}

arguments --load "$SAVE" "$@"
run torchrun --nnodes "$NODES" --node_rank "$NODE_RANK" --nproc_per_node "$GPUS" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$(realpath "$(dirname "$0")/../pretrain_gpt2.py")" \
    "${ARGUMENTS[@]}"
