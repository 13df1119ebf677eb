#!/usr/bin/env bash
# GPT, 1.3B parameters, from scratch: 20 tokens per parameter (arXiv 2203.15556). Learning rate, batch and warm-up of
# 375M tokens as for GPT-3 XL (arXiv 2005.14165, table 2.1 and appendix B).
#
#   bash recipes/gpt-1.3b.sh              DRY_RUN=1 prints the command; further flags are passed on
set -euo pipefail
# shellcheck source=recipes/common.sh
source "$(dirname "$0")/common.sh"

train --model-preset 1.3b --zero-stage 1 \
    --batch-size 8 --global-batch-size 512 --train-iters 25000 --lr-warmup-iters 358 --lr 2e-4 --min-lr 2e-5 "$@"
