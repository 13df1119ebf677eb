#!/usr/bin/env bash
# Run a command in the container, with this host's GPUs, network, data and checkpoints. Without a command: a shell.
#
#   bash docker/run.sh bash examples/ds_pretrain_gpt2.sh
#   bash docker/run.sh env TOKENIZER=data/tokenizer RUN_DIR=checkpoints/run bash recipes/gpt-350m.sh
#   IMAGE=megatron-deepspeed:0.1.0-cpu GPUS= bash docker/run.sh env OUT=checkpoints/quickstart \
#       bash examples/quickstart.sh
#   DOCKER=podman bash docker/run.sh ...           # or DOCKER=nvidia-docker
#
# On several hosts, with a key shared by all of them (ssh-keygen -t ed25519 -N "" -f cluster_key). Without a command the
# container waits for connections from the host that starts the run:
#
#   SSH_KEY=cluster_key SSH_ADDRESS=10.0.0.2 bash docker/run.sh
#   SSH_KEY=cluster_key SSH_ADDRESS=10.0.0.1 bash docker/run.sh \
#       python tools/launch.py --hostfile data/hostfile pretrain_gpt2.py ...
set -euo pipefail

IMAGE=${IMAGE:-megatron-deepspeed:0.1.0}
DOCKER=${DOCKER:-docker}                           # docker, nvidia-docker or podman
GPUS=${GPUS-all}                                   # all; for nvidia-docker and podman also 0,1; for docker
                                                   # a number, or '"device=0,1"' with its quotes; empty: none
DATA_DIR=${DATA_DIR:-$PWD/data}                    # data/ in the container; index maps are written there, too
CHECKPOINT_DIR=${CHECKPOINT_DIR:-$PWD/checkpoints} # checkpoints/ in the container
INFINIBAND=${INFINIBAND-/dev/infiniband}           # device files of RDMA, passed if they exist; empty: none
SSH_KEY=${SSH_KEY:-}                               # private key shared by all containers; empty: no sshd
SSH_ADDRESS=${SSH_ADDRESS:-}                       # address on which sshd listens: this host's address in the cluster's network
SSH_PORT=${SSH_PORT:-2222}                         # the same on all hosts

INSIDE=/opt/megatron-deepspeed
source_of() { # PATH: as a field of --mount, whose fields are CSV
    local field
    field=source=$(realpath -m "$1")
    case $field in *[\",]*) field=\"${field//\"/\"\"}\" ;; esac
    printf '%s' "$field"
}
FLAGS=(
    --rm --init
    --network host      # ranks find each other by the names of the hosts
    --ipc=host          # NCCL and data workers need more shared memory than Docker's default
    --ulimit memlock=-1 # RDMA pins memory
    # Files belong to the caller, who has neither name nor home directory in the container.
    --user "$(id -u):$(id -g)" --env USER=trainer --env HOME=/tmp
    --cap-drop ALL --security-opt no-new-privileges
    --mount "type=bind,$(source_of "$DATA_DIR"),target=$INSIDE/data"
    --mount "type=bind,$(source_of "$CHECKPOINT_DIR"),target=$INSIDE/checkpoints"
)
case "$(basename "$DOCKER"):$GPUS" in
    *:) ;;
    nvidia-docker:*) FLAGS+=(--env "NVIDIA_VISIBLE_DEVICES=$GPUS") ;;
    podman:*) # by the names of NVIDIA's container device interface: nvidia-ctk cdi generate
        for number in ${GPUS//,/ }; do FLAGS+=(--device "nvidia.com/gpu=$number"); done
        ;;
    *) FLAGS+=(--gpus "$GPUS") ;;
esac
# Without root, podman would map the caller to root in the container, and others' files to nobody.
if [ "$(basename "$DOCKER")" = podman ] && [ "$(id -u)" != 0 ]; then FLAGS+=(--userns keep-id); fi
if [ -n "$INFINIBAND" ] && [ -e "$INFINIBAND" ]; then FLAGS+=(--device "$INFINIBAND"); fi
if [ -n "$SSH_KEY" ]; then
    [ -n "$SSH_ADDRESS" ] || {
        echo "run.sh: error: SSH_KEY needs SSH_ADDRESS: the address of this host in the network of the cluster" >&2
        exit 2
    }
    FLAGS+=(
        --mount "type=bind,$(source_of "$SSH_KEY"),target=/run/secrets/ssh_key,readonly"
        --env "SSH_ADDRESS=$SSH_ADDRESS" --env "SSH_PORT=$SSH_PORT"
    )
fi
for name in "${!NCCL_@}" "${!GLOO_@}" "${!TORCH_NCCL_@}" "${!TORCH_FR_@}" "${!PYTORCH_@}" \
    "${!CUDA_DEVICE_MAX_CONNECTIONS@}"; do
    FLAGS+=(--env "$name")
done
if [ -t 0 ] && [ -t 1 ]; then FLAGS+=(--interactive --tty); fi

# DRY_RUN=1 prints the command instead of running it.
# shellcheck disable=SC1091
source "$(dirname "$0")/../tools/dry_run.sh" "${1:-}" # --help after a command is the command's
if ! is_on "${DRY_RUN:-0}" DRY_RUN && ! command -v "$DOCKER" >/dev/null; then
    echo "run.sh: error: DOCKER is $DOCKER, which is not installed: set docker, nvidia-docker or podman" >&2 && exit 2
fi
run mkdir -p "$DATA_DIR" "$CHECKPOINT_DIR"
run "$DOCKER" run "${FLAGS[@]}" "$IMAGE" "$@"
