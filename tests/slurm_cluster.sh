#!/usr/bin/env bash
# A real Slurm on this machine: a controller and NODES hosts, each with a name, a network and processes of its own.
# Started by hand; no test needs it. Needs root, and of Debian: slurmctld slurmd slurm-client munge iproute2
#
#   bash tests/slurm_cluster.sh                        trains a tiny model with recipes/slurm.sbatch on two hosts, stops
#                                                      it by a signal, and lets it resume, in the active environment
#   NODES=4 bash tests/slurm_cluster.sh COMMAND ...    runs COMMAND where sbatch, srun and squeue work
#
# All of it ends with the command. Jobs run as root, on CPUs; "GPUs" of a host are only counted by Slurm.
set -euo pipefail
cd "$(dirname "$0")/.."
NODES=${NODES:-2}
if [ -z "${LAB:-}" ]; then
    LAB=$(mktemp -d) && export LAB NODES
    code=0
    unshare --mount --net --uts --pid --fork --kill-child --mount-proc bash "$PWD/tests/${0##*/}" "$@" || code=$?
    ((code)) && tail -n 5 "$LAB"/*.log >&2
    rm -rf "$LAB"
    exit "$code"
fi

hostname login
mkdir -p "$LAB/slurm" "$LAB/munge" "$LAB/state"
chmod 755 "$LAB" "$LAB/munge"
names=$(seq -f node%g -s ' ' "$NODES")
{
    printf '127.0.0.1 localhost\n10.9.0.254 login\n'
    for name in $names; do echo "10.9.0.${name#node} $name"; done
} >"$LAB/hosts"
cat >"$LAB/slurm/slurm.conf" <<END
ClusterName=lab
SlurmctldHost=login
SlurmUser=root
AuthInfo=socket=$LAB/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=${NODE_TIMEOUT:-15}
KillWait=${KILL_WAIT:-30}
MessageTimeout=30
SlurmdParameters=config_overrides
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/%n
SlurmctldPidFile=$LAB/slurmctld.pid
SlurmdPidFile=$LAB/%n.pid
GresTypes=gpu
NodeName=node[1-$NODES] CPUs=16 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO
END
touch "$LAB/gpu0" "$LAB/gpu1"
echo "Name=gpu File=$LAB/gpu[0-1]" >"$LAB/slurm/gres.conf"
mkdir -p /etc/slurm
mount --bind "$LAB/slurm" /etc/slurm
mount --bind "$LAB/hosts" /etc/hosts

ip link set lo up
ip link add bridge type bridge
ip address add 10.9.0.254/24 dev bridge
ip link set bridge up
dd if=/dev/urandom of="$LAB/munge/key" bs=1024 count=1 status=none
chmod 400 "$LAB/munge/key"
munged --force --key-file "$LAB/munge/key" --socket "$LAB/munge/socket" --pid-file "$LAB/munge/pid" \
    --log-file "$LAB/munge.log" --seed-file "$LAB/munge/seed"
slurmctld -L "$LAB/slurmctld.log"

start_node() { # a name: its slurmd, as the first process of a host
    # shellcheck disable=SC2016
    unshare --mount --net --uts --pid --fork --kill-child --mount-proc bash -c '
        hostname "$1" && mount -t tmpfs none /dev/shm && mount -t tmpfs none /run && mkdir -m 1777 /run/tmp
        until ip link show eth0 >/dev/null 2>&1; do sleep 0.1; done
        ip link set lo up && ip address add "10.9.0.${1#node}/24" dev eth0 && ip link set eth0 up
        mkdir -p "$LAB/$1" && export TMPDIR=/run/tmp && exec slurmd -D -L "$LAB/$1.log"' node "$1" &
    local process=$!
    echo "$process" >"$LAB/$1.unshare"
    until [ "$(readlink "/proc/$process/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
    ip link add "$1" type veth peer name eth0 netns "$process"
    ip link set "$1" master bridge up
}
for name in $names; do start_node "$name"; done
until [ "$(sinfo --noheader --states idle --format %D)" = "$NODES" ]; do sleep 1; done
sinfo --version && sinfo --Node --noheader --format '%N %t %c CPUs %G'
if (($#)); then exec "$@"; fi

DATA=$LAB/corpus
export DATA TOKENIZER=$LAB SAVE=$LAB/checkpoints RUN_DIR=$LAB/runs DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
VENV=$(python -c 'import sys; print(sys.prefix)') && export VENV
python tools/make_python_corpus.py --output "$DATA.jsonl" --max-megabytes 0.5
python tools/train_tokenizer.py --input "$DATA.jsonl" --vocab-size 512 --output-dir "$TOKENIZER"
python tools/preprocess_data.py --input "$DATA.jsonl" --output-prefix "$DATA" --append-eod \
    --tokenizer-type GPT2BPETokenizer --tokenizer-model "$TOKENIZER"
DATA=${DATA}_text_document
job=$(sbatch --parsable --nodes 2 --ntasks-per-node 2 --gpus-per-node 2 --cpus-per-task 2 --output "$LAB/job" \
    recipes/slurm.sbatch recipes/gpt-125m.sh --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \
    --max-position-embeddings 64 --batch-size 4 --global-batch-size 16 --train-iters 200 --lr-warmup-iters 5 \
    --eval-iters 0 --log-interval 1)
until grep -q '^iteration *20/' "$LAB/job" 2>/dev/null || [ -z "$(squeue --noheader)" ]; do sleep 0.5; done
echo "> stopping job $job, which saves; it is queued again"
scancel --signal=TERM "$job"
until [ -z "$(squeue --noheader --states RUNNING,COMPLETING)" ]; do sleep 0.5; done
scontrol update "JobId=$job" StartTime=now
while squeue --noheader | grep -q .; do sleep 1; done
grep -Ev 'has no effect|^iteration +[0-9]*[1-9]/' "$LAB/job"
[ "$(cat "$SAVE/latest")" = global_step200 ] && grep -q 'resuming after iteration' "$LAB/job"
