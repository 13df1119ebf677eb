#!/usr/bin/env bash
# Llama 3.1 70B, from scratch, on 8 hosts of 8 GPUs. Learning rate as published (arXiv 2407.21783, table 3); batch of 4M
# tokens, warm-up and decay to a tenth as for Llama 2 (arXiv 2307.09288, section 2.2). 20 tokens per parameter.
#
#   sbatch --nodes 8 recipes/slurm.sbatch recipes/llama-70b.sh
#   HOSTFILE=hostfile bash recipes/llama-70b.sh         DRY_RUN=1 prints the command; further flags are passed on
set -euo pipefail
GPUS=${GPUS:-64} HOSTFILE=${HOSTFILE:-hostfile}
# shellcheck source=recipes/common.sh
source "$(dirname "$0")/common.sh"

train --model-preset llama3.1-70b --no-use-rope-scaling --tokenizer-type HuggingFaceTokenizer \
    --model-parallel-size 8 --sequence-parallel --pipe-parallel-size 2 --zero-stage 1 \
    --batch-size 1 --global-batch-size 512 --train-iters 336000 --lr-warmup-iters 2000 --lr 1.5e-4 --min-lr 1.5e-5 "$@"
