#!/usr/bin/env bash
# Llama 3.1 8B, from scratch. Learning rate as published (arXiv 2407.21783, table 3); batch of 4M tokens, warm-up and
# decay to a tenth as for Llama 2 (arXiv 2307.09288, section 2.2). The length is 20 tokens per parameter.
#
#   TOKENIZER=llama-3.1-8b bash recipes/llama-8b.sh     DRY_RUN=1 prints the command; further flags are passed on
set -euo pipefail
# shellcheck source=recipes/common.sh
source "$(dirname "$0")/common.sh"

train --model-preset llama3.1-8b --no-use-rope-scaling --tokenizer-type HuggingFaceTokenizer \
    --model-parallel-size 2 --sequence-parallel --zero-stage 1 \
    --batch-size 1 --global-batch-size 512 --train-iters 38000 --lr-warmup-iters 2000 --lr 3e-4 --min-lr 3e-5 "$@"
