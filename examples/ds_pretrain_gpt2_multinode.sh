#!/usr/bin/env bash
# Pretrain GPT-2 (345M) on several hosts: tensor x pipeline x data parallel, started by tools/launch.py.
#
#   HOSTFILE=hostfile bash examples/ds_pretrain_gpt2_multinode.sh --seed 7              on all hosts of the file
#   INCLUDE=worker-1:0,1@worker-2:0,1 bash examples/ds_pretrain_gpt2_multinode.sh       on some slots of some hosts
#   LAUNCHER=openmpi INTERFACE=eth1 bash examples/ds_pretrain_gpt2_multinode.sh         over mpirun instead of pdsh
#   NODE_RANK=0 MASTER_ADDR=worker-1 bash examples/ds_pretrain_gpt2_multinode.sh        without ssh: once on each host
#
# See docs/multinode.md for requirements and output. Data (the same paths on every host), model and training are set in
# tools/gpt2_345m.sh. With --deepspeed_config FILE, the settings in the file must agree with the scripts.
# DRY_RUN=1 prints the command instead of running it.
set -euo pipefail
# shellcheck source=tools/gpt2_345m.sh
source "$(dirname "$0")/../tools/gpt2_345m.sh"

SAVE=${SAVE:-checkpoints/gpt2_345m_multinode} # checkpoints: a run resumes from its own
TP=${TP:-2}                                   # tensor-parallel size, within a host
PP=${PP:-2}                                   # pipeline stages, 0: none; the remaining processes are data parallel
ZERO_STAGE=${ZERO_STAGE:-1}                   # 0 or 1 with a pipeline

# Hosts.
HOSTFILE=${HOSTFILE:-hostfile} # see hostfile.example
INCLUDE=${INCLUDE:-}           # host:slots@host:slots, slots separated by commas; pdsh only
LAUNCHER=${LAUNCHER:-pdsh}     # pdsh, openmpi or mpich
INTERFACE=${INTERFACE:-}       # network interface of the cluster, for openmpi; default eth0
SSH_PORT=${SSH_PORT:-}         # empty: ssh's default; pdsh only
NODE_RANK=${NODE_RANK:-}       # without ssh: index of this host in the hostfile, from 0
MASTER_ADDR=${MASTER_ADDR:-}   # address of the first host; if empty, it is requested by ssh
MASTER_PORT=${MASTER_PORT:-29500}

check_numbers 1 TP MASTER_PORT ${SSH_PORT:+SSH_PORT}
check_numbers 0 PP ZERO_STAGE ${NODE_RANK:+NODE_RANK}
[ -f "$HOSTFILE" ] || fail "$HOSTFILE: no such hostfile: copy hostfile.example and list your hosts in it"
case $LAUNCHER in
    pdsh | openmpi | mpich | impi | slurm | mvapich) ;;
    *) fail "LAUNCHER=$LAUNCHER: give pdsh, openmpi or mpich" ;;
esac
if [ "$LAUNCHER" != pdsh ] && [ -n "$INCLUDE$SSH_PORT" ]; then
    fail "INCLUDE and SSH_PORT require LAUNCHER=pdsh: use a hostfile, and set the port in ~/.ssh/config"
fi
if [ -n "$INTERFACE" ] && [ "$LAUNCHER" != openmpi ]; then
    fail "INTERFACE requires LAUNCHER=openmpi: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in .deepspeed_env"
fi
if [ -n "$NODE_RANK" ] && [ -z "$MASTER_ADDR" ]; then
    fail "NODE_RANK requires MASTER_ADDR: the address of the first host of $HOSTFILE"
fi
LAST=$(($(grep -c '^[[:space:]]*[^#[:space:]]' "$HOSTFILE") - 1))
((NODE_RANK <= LAST)) || fail "NODE_RANK is $NODE_RANK: give this host's number in $HOSTFILE, from 0 to $LAST"

HOSTS=(--hostfile "$HOSTFILE" --master_port "$MASTER_PORT")
if [ -n "$MASTER_ADDR" ]; then HOSTS+=(--master_addr "$MASTER_ADDR"); fi
if [ -n "$INCLUDE" ]; then HOSTS+=(--include "$INCLUDE"); fi
if [ -n "$SSH_PORT" ]; then HOSTS+=(--ssh_port "$SSH_PORT"); fi
if [ -n "$NODE_RANK" ]; then HOSTS+=(--no_ssh --node_rank "$NODE_RANK"); else HOSTS+=(--launcher "$LAUNCHER"); fi
if [ -n "$INTERFACE" ]; then HOSTS+=("--launcher_args=--mca btl_tcp_if_include $INTERFACE"); fi

arguments --load "$SAVE" --checkpoint-activations "$@"
HERE=$(realpath "$(dirname "$0")/..")
run python "$HERE/tools/launch.py" "${HOSTS[@]}" "$HERE/pretrain_gpt2.py" "${ARGUMENTS[@]}"
