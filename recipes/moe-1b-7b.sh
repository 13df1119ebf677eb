#!/usr/bin/env bash
# A mixture of experts from scratch: 8 of 64 experts for each token, 1.3B of 6.9B parameters active. Sizes, learning
# rate, batch and both auxiliary losses as for OLMoE-1B-7B (arXiv 2409.02060, table 10); the length is 20 tokens per active
# parameter, and the warm-up is shortened with it.
#
#   TOKENIZER=olmoe bash recipes/moe-1b-7b.sh           DRY_RUN=1 prints the command; further flags are passed on
set -euo pipefail
# shellcheck source=recipes/common.sh
source "$(dirname "$0")/common.sh"

train --tokenizer-type HuggingFaceTokenizer --num-layers 16 --hidden-size 2048 --num-attention-heads 16 \
    --seq-length 4096 --swiglu --normalization RMSNorm --qk-layernorm --position-embedding-type rope \
    --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 64 --moe-router-topk 8 --moe-router-pre-softmax \
    --moe-ffn-hidden-size 1024 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 --moe-grouped-gemm --zero-stage 1 \
    --batch-size 2 --global-batch-size 1024 --train-iters 6200 --lr-warmup-iters 500 --lr 4e-4 --min-lr 4e-5 "$@"
