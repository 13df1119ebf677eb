#!/usr/bin/env bash
# Run a command in the container, with this host's GPUs, network, data and checkpoints; a shell without one.
#
#   bash docker/run.sh bash examples/ds_pretrain_gpt2.sh
#   IMAGE=megatron-deepspeed:cpu GPUS= bash docker/run.sh env OUT=checkpoints/quickstart bash examples/quickstart.sh
set -euo pipefail

IMAGE=${IMAGE:-megatron-deepspeed}
GPUS=${GPUS-all}                                   # all, a number, or '"device=0,1"' with its quotes; empty is none
DATA_DIR=${DATA_DIR:-$PWD/data}                    # data/ inside; index maps are written there, beside the data
CHECKPOINT_DIR=${CHECKPOINT_DIR:-$PWD/checkpoints} # checkpoints/ inside

INSIDE=/opt/megatron-deepspeed
FLAGS=(
    --rm --init
    --network host      # ranks find those of other hosts by the hosts' own names
    --ipc=host          # NCCL and data workers share more memory than a container has by itself
    --ulimit memlock=-1 # RDMA pins memory
    # What it writes belongs to the caller, who has no name and no home inside.
    --user "$(id -u):$(id -g)" --env USER=trainer --env HOME=/tmp
    --mount "type=bind,source=$(realpath -m "$DATA_DIR"),target=$INSIDE/data"
    --mount "type=bind,source=$(realpath -m "$CHECKPOINT_DIR"),target=$INSIDE/checkpoints"
)
if [ -n "$GPUS" ]; then FLAGS+=(--gpus "$GPUS"); fi
if [ -t 0 ] && [ -t 1 ]; then FLAGS+=(--interactive --tty); fi

# DRY_RUN=1 shows the command instead of running it.
run() { if ((${DRY_RUN:-0})); then printf '%q ' "$@" && echo; else "$@"; fi; }
run mkdir -p "$DATA_DIR" "$CHECKPOINT_DIR"
run docker run "${FLAGS[@]}" "$IMAGE" "${@:-bash}"
