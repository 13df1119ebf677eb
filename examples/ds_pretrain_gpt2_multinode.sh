#!/usr/bin/env bash
# Pretrain GPT-2 (345M) on several hosts: tensor x pipeline x data parallel, over DeepSpeed's launchers.
#
#   HOSTFILE=hostfile bash examples/ds_pretrain_gpt2_multinode.sh --seed 7              on all hosts of the file
#   INCLUDE=worker-1:0,1@worker-2:0,1 bash examples/ds_pretrain_gpt2_multinode.sh       on some slots of some hosts
#   LAUNCHER=openmpi INTERFACE=eth1 bash examples/ds_pretrain_gpt2_multinode.sh         over mpirun instead of pdsh
#   NODE_RANK=0 MASTER_ADDR=worker-1 bash examples/ds_pretrain_gpt2_multinode.sh        without ssh: once on each host
#
# See docs/multinode.md for requirements and output. With --deepspeed_config FILE, the settings in the file must agree
# with those of this script.
set -euo pipefail

# Data, as tools/preprocess_data.py writes it (PREFIX.bin and .idx), and checkpoints: the same path on every host.
DATA=${DATA:-data/corpus_text_document}
VOCAB=${VOCAB:-data/vocab.json}
MERGES=${MERGES-data/merges.txt} # empty for --tokenizer-type WhitespaceTokenizer, which has no merges
SAVE=${SAVE:-checkpoints/gpt2_345m_multinode}
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
TP=${TP:-2}                 # tensor-parallel size, within a host
PP=${PP:-2}                 # pipeline stages, 0: plain engine; processes / (TP x PP) is the data-parallel size
ZERO_STAGE=${ZERO_STAGE:-1} # 0 or 1 with a pipeline

# Hosts.
HOSTFILE=${HOSTFILE:-hostfile} # see hostfile.example
INCLUDE=${INCLUDE:-}           # host:slots@host:slots, slots separated by commas; pdsh only
LAUNCHER=${LAUNCHER:-pdsh}     # pdsh, openmpi or mpich
INTERFACE=${INTERFACE:-}       # network interface of the cluster, for openmpi; default eth0
SSH_PORT=${SSH_PORT:-}         # empty: ssh's default; pdsh only
NODE_RANK=${NODE_RANK:-}       # without ssh: index of this host in the hostfile, from 0
MASTER_ADDR=${MASTER_ADDR:-}   # address of the first host; if empty, it is requested by ssh
MASTER_PORT=${MASTER_PORT:-29500}

fail() { echo "$(basename "$0"): error: $1" >&2 && exit 2; }
[ -f "$HOSTFILE" ] || fail "$HOSTFILE: no such hostfile: copy hostfile.example and list your hosts in it"
if [ "$LAUNCHER" != pdsh ] && [ -n "$INCLUDE$SSH_PORT" ]; then
    fail "INCLUDE and SSH_PORT require LAUNCHER=pdsh: use a hostfile, and set the port in ~/.ssh/config"
fi
if [ -n "$INTERFACE" ] && [ "$LAUNCHER" != openmpi ]; then
    fail "INTERFACE requires LAUNCHER=openmpi: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in .deepspeed_env"
fi
if [ -n "$NODE_RANK" ] && [ -z "$MASTER_ADDR" ]; then
    fail "NODE_RANK requires MASTER_ADDR: the address of the first host of $HOSTFILE"
fi

HOSTS=(--log_level warning --hostfile "$HOSTFILE" --master_port "$MASTER_PORT")
if [ -n "$MASTER_ADDR" ]; then HOSTS+=(--master_addr "$MASTER_ADDR"); fi
if [ -n "$INCLUDE" ]; then HOSTS+=(--include "$INCLUDE"); fi
if [ -n "$SSH_PORT" ]; then HOSTS+=(--ssh_port "$SSH_PORT"); fi
if [ -n "$NODE_RANK" ]; then HOSTS+=(--no_ssh --node_rank "$NODE_RANK"); else HOSTS+=(--launcher "$LAUNCHER"); fi
if [ -n "$INTERFACE" ]; then HOSTS+=("--launcher_args=--mca btl_tcp_if_include $INTERFACE"); fi

SWITCHES=(--checkpoint-activations)
if [ "$PRECISION" != fp32 ]; then SWITCHES+=("--$PRECISION"); fi

# DRY_RUN=1 prints the command instead of running it.
# shellcheck disable=SC1091
source "$(dirname "$0")/../tools/dry_run.sh"
run deepspeed "${HOSTS[@]}" "$(realpath "$(dirname "$0")/..")/pretrain_gpt2.py" \
    --model-parallel-size "$TP" --pipe-parallel-size "$PP" \
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS" \
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" \
    --batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$ITERATIONS" \
    --lr "$LR" --min-lr "$MIN_LR" --lr-decay-style cosine --warmup 0.01 --weight-decay 0.01 --clip-grad 1.0 \
    --zero-stage "$ZERO_STAGE" "${SWITCHES[@]}" \
    --data-path "$DATA" --vocab-file "$VOCAB" ${MERGES:+--merge-file "$MERGES"} --split 949,50,1 \
    --save "$SAVE" --load "$SAVE" --save-interval "$SAVE_INTERVAL" \
    --eval-interval 1000 --eval-iters 10 "$@"
