#!/usr/bin/env bash
# Fine-tune a Llama, Mistral, Qwen2 or Qwen3 of Hugging Face on conversations: with adapters (LoRA), or all weights.
#
#   HF_MODEL=llama-3.2-1b DATA=chat.jsonl bash examples/finetune_llama.sh     adapters, on this host's 8 GPUs
#   LORA_RANK=0 ZERO_STAGE=3 CPU_OPTIMIZER=1 bash examples/finetune_llama.sh --seed 7     all weights, and a further flag
#   TP=2 PP=2 EXPORT=my-llama bash examples/finetune_llama.sh     and the result as a folder for transformers
#   DS_ACCELERATOR=cpu GPUS=2 SEQ_LENGTH=256 bash examples/finetune_llama.sh
set -euo pipefail

# Model: a folder with config.json, safetensors and tokenizer.json. Data: a conversation on each line.
HF_MODEL=${HF_MODEL:-llama-3.2-1b}
DATA=${DATA:-chat.jsonl}
FORMAT=${FORMAT:-messages}       # or prompt-completion
CHAT_TEMPLATE=${CHAT_TEMPLATE:-} # empty: the one of HF_MODEL
# Prefix of the data set that is made of DATA, unless it is newer than DATA, the template and the tokenizer.
TOKENS=${TOKENS:-${DATA%.jsonl}_$(basename "$HF_MODEL")${CHAT_TEMPLATE:+_$(basename "${CHAT_TEMPLATE%.*}")}}
SPLIT=${SPLIT:-95,5,0}           # training, validation, test
WORKERS=${WORKERS:-8}            # processes that tokenize

# Checkpoints: a run resumes from its own. EXPORT names a folder to write in the end, adapters merged; empty: none.
SAVE=${SAVE:-checkpoints/finetuned}
SAVE_INTERVAL=${SAVE_INTERVAL:-100}
EXPORT=${EXPORT:-}

# Adapters of all linear layers. With LORA_RANK=0 all weights are trained.
LORA_RANK=${LORA_RANK:-16}
LORA_ALPHA=${LORA_ALPHA:-32}
LORA_DROPOUT=${LORA_DROPOUT:-0.05}

# Training. Batch sizes are in samples of SEQ_LENGTH tokens, each of which holds several conversations.
SEQ_LENGTH=${SEQ_LENGTH:-2048}
MICRO_BATCH=${MICRO_BATCH:-1}
# 50 conversations of 500 tokens are 12 samples, and 3 epochs of them 5 iterations.
GLOBAL_BATCH=${GLOBAL_BATCH:-8}
EPOCHS=${EPOCHS:-3}
ITERATIONS=${ITERATIONS:-} # instead of EPOCHS, if it is not empty
LR=${LR:-$([ "$LORA_RANK" != 0 ] && echo 2e-4 || echo 1e-5)}
PRECISION=${PRECISION:-$([ "${DS_ACCELERATOR:-}" = cpu ] && echo fp32 || echo bf16)} # fp32, bf16 or fp16

# Layout. GPUS is the number of processes, also on CPUs. Here and below, 1 is on and 0 is off.
GPUS=${GPUS:-8}
MASTER_PORT=${MASTER_PORT:-29500}
TP=${TP:-1}                 # tensor-parallel size
PP=${PP:-0}                 # pipeline stages, 0: no pipeline; processes / (TP x PP) is the data-parallel size
ZERO_STAGE=${ZERO_STAGE:-1} # 0 or 1 with a pipeline
CPU_OPTIMIZER=${CPU_OPTIMIZER:-0}
CHECKPOINT_ACTIVATIONS=${CHECKPOINT_ACTIVATIONS:-1}

# DRY_RUN=1 prints the commands instead of running them.
HERE=$(realpath "$(dirname "$0")/..")
# shellcheck source=tools/dry_run.sh
source "$HERE/tools/dry_run.sh"
check_numbers 1 GPUS TP MASTER_PORT WORKERS
check_numbers 0 PP ZERO_STAGE LORA_RANK

LENGTH=(--epochs "$EPOCHS")
if [ -n "$ITERATIONS" ]; then LENGTH=(--train-iters "$ITERATIONS"); fi
SWITCHES=()
if [ "$LORA_RANK" != 0 ]; then
    SWITCHES+=(--lora-rank "$LORA_RANK" --lora-alpha "$LORA_ALPHA" --lora-dropout "$LORA_DROPOUT")
fi
switch "$CPU_OPTIMIZER" --cpu-optimizer
switch "$CHECKPOINT_ACTIVATIONS" --checkpoint-activations
if [ "$PRECISION" != fp32 ]; then SWITCHES+=("--$PRECISION"); fi

TOKENIZER=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$HF_MODEL")
PREFIX=${TOKENS}_${FORMAT}_document
END=$([ "$FORMAT" = messages ] || echo --append-eod) # a chat template ends turns by itself

if ! is_newer "$PREFIX.idx" "$DATA" "$CHAT_TEMPLATE" \
    "$HF_MODEL"/{tokenizer.json,tokenizer_config.json,chat_template.jinja,additional_chat_templates/*.jinja}; then
    run python "$HERE/tools/preprocess_data.py" --input "$DATA" --format "$FORMAT" --output-prefix "$TOKENS" \
        "${TOKENIZER[@]}" ${CHAT_TEMPLATE:+--chat-template "$CHAT_TEMPLATE"} ${END:+"$END"} --workers "$WORKERS"
fi
run deepspeed --log_level critical --num_gpus "$GPUS" --master_port "$MASTER_PORT" \
    "$HERE/pretrain_gpt2.py" --load-hf "$HF_MODEL" "${TOKENIZER[@]}" --sft \
    --model-parallel-size "$TP" --pipe-parallel-size "$PP" --zero-stage "$ZERO_STAGE" \
    --seq-length "$SEQ_LENGTH" --batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" \
    "${LENGTH[@]}" --lr "$LR" --lr-decay-style cosine --warmup 0.03 --weight-decay 0 --clip-grad 1.0 \
    "${SWITCHES[@]}" --data-path "$PREFIX" --split "$SPLIT" --eval-interval "$SAVE_INTERVAL" --eval-iters 10 \
    --save "$SAVE" --save-interval "$SAVE_INTERVAL" --auto-resume "$@"

MERGE=$([ "$LORA_RANK" = 0 ] || echo --merge-lora)
if [ -n "$EXPORT" ]; then
    run python "$HERE/tools/convert_checkpoint.py" to-hf "$SAVE" ${MERGE:+"$MERGE"} --output "$EXPORT"
elif ! is_on "${DRY_RUN:-0}" DRY_RUN; then
    echo "> for transformers: python tools/convert_checkpoint.py to-hf $SAVE $MERGE --output NAME"
    [ "$LORA_RANK" = 0 ] || echo "> for peft: python tools/convert_checkpoint.py to-peft $SAVE --base $HF_MODEL --output NAME"
fi
