#!/usr/bin/env bash
# Evaluate GPT-2 on LAMBADA: the share of passages whose last word is predicted from what precedes it.
#
#   VALID_DATA=lambada_test.jsonl bash examples/evaluate_lambada.sh     one JSON object with the accuracy
#   GPUS=4 TP=2 LOAD=checkpoints/my bash examples/evaluate_lambada.sh --json result.json     2 replicas of TP 2
#   TASK=WIKITEXT103 VALID_DATA=wiki.test.tokens bash examples/evaluate_lambada.sh     the perplexity of WikiText
#   DS_ACCELERATOR=cpu GPUS=1 bash examples/evaluate_lambada.sh
#
# The model's sizes, its attention window and its tokenizer are read from the checkpoint.
set -euo pipefail

# What is evaluated.
TASK=${TASK:-LAMBADA}
VALID_DATA=${VALID_DATA:-data/lambada_test.jsonl}
LOAD=${LOAD:-checkpoints/gpt2_345m} # checkpoint of any layout, merged weights or a Hugging Face GPT-2
VOCAB=${VOCAB:-}                    # only if these files were moved since training
MERGES=${MERGES:-}

# How.
OVERLAPPING_EVAL=${OVERLAPPING_EVAL:-32} # tokens from one window of a long text to the next; of no effect on LAMBADA
BATCH=${BATCH:-8}                        # samples that are scored together
PRECISION=${PRECISION:-$([ "${DS_ACCELERATOR:-}" = cpu ] && echo fp32 || echo fp16)} # fp32, bf16 or fp16

# Processes. GPUS is their number, also on CPUs.
GPUS=${GPUS:-8}
MASTER_PORT=${MASTER_PORT:-29500}
TP=${TP:-1} # tensor-parallel size
PP=${PP:-0} # pipeline stages, 0: none; processes / (TP x PP) replicas share the samples

# DRY_RUN=1 prints the command instead of running it.
# shellcheck disable=SC1091
source "$(dirname "$0")/../tools/dry_run.sh"
check_numbers 1 GPUS TP MASTER_PORT
check_numbers 0 PP
SWITCHES=()
if [ "$PRECISION" != fp32 ]; then SWITCHES+=("--$PRECISION"); fi
run deepspeed --log_level critical --num_gpus "$GPUS" --master_port "$MASTER_PORT" \
    "$(realpath "$(dirname "$0")/../tools/evaluate.py")" \
    --task "$TASK" --strict-lambada --valid-data "$VALID_DATA" --overlapping-eval "$OVERLAPPING_EVAL" --load "$LOAD" \
    ${VOCAB:+--vocab-file "$VOCAB"} ${MERGES:+--merge-file "$MERGES"} \
    --model-parallel-size "$TP" --pipe-parallel-size "$PP" --batch-size "$BATCH" "${SWITCHES[@]}" \
    --checkpoint-activations --log-interval 10 --no-load-optim --no-load-rng "$@"
