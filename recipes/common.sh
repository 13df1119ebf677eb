# shellcheck shell=bash disable=SC2034,SC2054
# Sourced by the recipes: what they share. A variable of the environment replaces each setting.
#
#   train FLAGS ...   starts pretrain_gpt2.py on GPUS processes, or prints the command with DRY_RUN=1

HERE=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
NAME=$(basename "$0" .sh)

DATA=${DATA:-data/text_document}       # prefix of .bin and .idx, from tools/preprocess_data.py
TOKENIZER=${TOKENIZER:-tokenizer}      # folder of vocab.json and merges.txt, or of tokenizer.json
SAVE=${SAVE:-checkpoints/$NAME}        # a run resumes from its own checkpoints
START=${START:-}                       # weights to begin with, until SAVE has a checkpoint
RUN_DIR=${RUN_DIR:-runs/$NAME}         # metrics, for tools/report.py
GPUS=${GPUS:-8}                        # all processes of the run
HOSTFILE=${HOSTFILE:-}                 # the hosts, if the run takes several; see hostfile.example
LAUNCHER=${LAUNCHER:-deepspeed}        # or srun, which recipes/slurm.sbatch sets
MASTER_PORT=${MASTER_PORT:-29500}
COMPILE=${COMPILE:-$([ "${DS_ACCELERATOR:-}" = cpu ] && echo 0 || echo 1)} # 1: --compile, which helps on GPUs only

# shellcheck source=tools/dry_run.sh
source "$HERE/tools/dry_run.sh"

check_numbers 1 GPUS MASTER_PORT

train() {
    local begin=(--auto-resume)
    if [ -n "$START" ] && [ ! -e "$SAVE/latest" ]; then begin=(--load "$START" --finetune); fi
    local arguments=(
        --bf16 --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --lr-decay-style cosine
        --attention-dropout 0 --hidden-dropout 0
        --data-path "$DATA" --split 99,1,0 --tokenizer-model "$TOKENIZER" --save "$SAVE" "${begin[@]}"
        --save-interval 1000 --keep-last 3 --async-save --eval-interval 1000 --eval-iters 20 --run-dir "$RUN_DIR" "$@"
    )
    if is_on "$COMPILE" COMPILE; then arguments+=(--compile); fi
    local start=(deepspeed --log_level critical --num_gpus "$GPUS")
    if [ -n "$HOSTFILE" ]; then start=(python "$HERE/tools/launch.py" --hostfile "$HOSTFILE"); fi
    case "$LAUNCHER" in
    deepspeed)
        run "${start[@]}" --master_port "$MASTER_PORT" "$HERE/pretrain_gpt2.py" "${arguments[@]}"
        ;;
    srun) # each task is a rank; the variables are from recipes/slurm.sbatch
        # shellcheck disable=SC2086
        run srun --kill-on-bad-exit=1 $SRUN_FLAGS $SRUN_PREFIX "$PYTHON" "$HERE/pretrain_gpt2.py" "${arguments[@]}"
        ;;
    *) fail "LAUNCHER=$LAUNCHER: give deepspeed or srun" ;;
    esac
}

