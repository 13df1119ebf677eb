#!/usr/bin/env bash
# GPT, 125M parameters, from scratch: 20 tokens per parameter (arXiv 2203.15556). Learning rate, batch and warm-up of
# 375M tokens as for GPT-3 Small (arXiv 2005.14165, table 2.1 and appendix B).
#
#   bash recipes/gpt-125m.sh              DRY_RUN=1 prints the command; further flags are passed on
set -euo pipefail
# shellcheck source=recipes/common.sh
source "$(dirname "$0")/common.sh"

train --model-preset gpt2 --seq-length 2048 --max-position-embeddings 2048 --zero-stage 1 \
    --batch-size 32 --global-batch-size 256 --train-iters 4800 --lr-warmup-iters 715 --lr 6e-4 --min-lr 6e-5 "$@"
