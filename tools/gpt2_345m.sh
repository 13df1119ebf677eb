# shellcheck shell=bash disable=SC2034,SC2054
# Sourced by the scripts that pretrain GPT-2 (345M): the settings and arguments that they share. A variable of the
# environment replaces a setting. Also gives them "run", which prints the command with DRY_RUN=1.
#
#   switch VALUE FLAG [OTHER]   adds FLAG to the arguments if the setting is 1, OTHER if it is 0
#   arguments ...                 sets ARGUMENTS to the arguments of pretrain_gpt2.py, followed by further ones

# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/dry_run.sh"

# Data, as tools/preprocess_data.py writes it (PREFIX.bin and .idx), and the interval of checkpoints.
DATA=${DATA:-data/corpus_text_document}
VOCAB=${VOCAB:-data/vocab.json}
MERGES=${MERGES-data/merges.txt} # empty for --tokenizer-type WhitespaceTokenizer, which has no merges
SAVE_INTERVAL=${SAVE_INTERVAL:-5000}

# Model.
LAYERS=${LAYERS:-24}
HIDDEN=${HIDDEN:-1024}
HEADS=${HEADS:-16}
SEQ_LENGTH=${SEQ_LENGTH:-1024}

# Training. Batch sizes are in samples; the number of micro-batches follows from the global batch. The more
# micro-batches, the smaller the pipeline bubble.
MICRO_BATCH=${MICRO_BATCH:-4}
GLOBAL_BATCH=${GLOBAL_BATCH:-64}
ITERATIONS=${ITERATIONS:-320000}
LR=${LR:-1.5e-4}
MIN_LR=${MIN_LR:-1e-5}
PRECISION=${PRECISION:-$([ "${DS_ACCELERATOR:-}" = cpu ] && echo fp32 || echo fp16)} # fp32, bf16 or fp16

SWITCHES=()

arguments() { # uses TP, PP, ZERO_STAGE and SAVE, which each script has
    if [ "$PRECISION" != fp32 ]; then SWITCHES+=("--$PRECISION"); fi
    ARGUMENTS=(
        --model-parallel-size "$TP" --pipe-parallel-size "$PP" --zero-stage "$ZERO_STAGE"
        --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS"
        --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
        --batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$ITERATIONS"
        --lr "$LR" --min-lr "$MIN_LR" --lr-decay-style cosine --warmup 0.01 --weight-decay 0.01 --clip-grad 1.0
        --data-path "$DATA" --vocab-file "$VOCAB" ${MERGES:+--merge-file "$MERGES"} --split 949,50,1
        --save "$SAVE" --save-interval "$SAVE_INTERVAL" --eval-interval 1000 --eval-iters 10
        "${SWITCHES[@]}" "$@"
    )
}
