#!/usr/bin/env bash
# Low-rank adapters for a Llama 3.1 8B on conversations. Rank, scale, dropout, batch, learning rate, clipping and Adam's beta2
# as for the 7B and 13B models of QLoRA (arXiv 2305.14314, appendix B), with weights in bf16.
#
#   HF_MODEL=llama-3.1-8b DATA=chat.jsonl bash recipes/lora-llama-8b.sh     DRY_RUN=1 prints the commands
#
# The other variables are those of examples/finetune_llama.sh, which this calls; further flags are passed on.
set -euo pipefail
export HF_MODEL=${HF_MODEL:-llama-3.1-8b} DATA=${DATA:-chat.jsonl} SAVE=${SAVE:-checkpoints/lora-llama-8b}
export LORA_RANK=${LORA_RANK:-64} LORA_ALPHA=${LORA_ALPHA:-16} LORA_DROPOUT=${LORA_DROPOUT:-0.1} LR=${LR:-2e-4}
export GPUS=${GPUS:-8} GLOBAL_BATCH=${GLOBAL_BATCH:-16} MICRO_BATCH=${MICRO_BATCH:-2} SEQ_LENGTH=${SEQ_LENGTH:-2048}
export CHECKPOINT_ACTIVATIONS=${CHECKPOINT_ACTIVATIONS:-0}
exec bash "$(dirname "$0")/../examples/finetune_llama.sh" --lr-decay-style constant --adam-beta2 0.999 --clip-grad 0.3 "$@"
