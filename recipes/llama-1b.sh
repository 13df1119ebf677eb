#!/usr/bin/env bash
# Llama 3.2 1B, from scratch. Learning rate, batch of 2M tokens and warm-up as for TinyLlama 1.1B (arXiv 2401.02385);
# the length is 20 tokens per parameter.
#
#   TOKENIZER=llama-3.2-1b bash recipes/llama-1b.sh     DRY_RUN=1 prints the command; further flags are passed on
set -euo pipefail
# shellcheck source=recipes/common.sh
source "$(dirname "$0")/common.sh"

train --model-preset llama3.2-1b --no-use-rope-scaling --rope-scaling-factor 8 --tokenizer-type HuggingFaceTokenizer --seq-length 2048 \
    --zero-stage 1 --batch-size 8 --global-batch-size 1024 --train-iters 12000 --lr-warmup-iters 2000 \
    --lr 4e-4 --min-lr 4e-5 "$@"
