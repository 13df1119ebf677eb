#!/usr/bin/env bash
# Pretrain GPT-2 (345M) on DeepSpeed's pipeline engine: tensor x pipeline x data parallel, ZeRO 0 or 1.
#
#   bash examples/ds_pretrain_gpt2_pipe.sh                              on this host's 8 GPUs: TP 2 x PP 2 x DP 2
#   TP=1 PP=4 GPUS=4 bash examples/ds_pretrain_gpt2_pipe.sh --seed 7    other settings, and a further flag
#   DS_ACCELERATOR=cpu GPUS=4 LAYERS=4 HIDDEN=128 SEQ_LENGTH=128 bash examples/ds_pretrain_gpt2_pipe.sh
#
# This is ds_pretrain_gpt2.sh, which has all settings, with other defaults.
set -euo pipefail

SAVE=${SAVE:-checkpoints/gpt2_345m_3d}
TP=${TP:-2}
PP=${PP:-2}
ZERO_STAGE=${ZERO_STAGE:-1}
export SAVE TP PP ZERO_STAGE
exec bash "$(dirname "$0")/ds_pretrain_gpt2.sh" "$@"
