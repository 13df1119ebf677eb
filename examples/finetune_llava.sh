#!/usr/bin/env bash
# Train LLaVA on conversations with images, from published weights: stage 1 the projector on captions, stage 2 projector
# and language model on instructions.
#
#   python tools/convert_checkpoint.py join-llava clip-vit-large-patch14-336 vicuna-7b-v1.5 --image-token-id 32000 --output llava-new
#   HF_MODEL=llava-new CAPTIONS=blip.json INSTRUCTIONS=mix.json IMAGES=images bash examples/finetune_llava.sh     on this host's 8 GPUs
#   LORA_RANK=16 ZERO_STAGE=2 bash examples/finetune_llava.sh --seed 7     adapters of the language model, and a further flag
#   TP=2 EXPORT=my-llava bash examples/finetune_llava.sh     and the result as a folder for transformers
set -euo pipefail

# Model: a LLaVA of Hugging Face with a tokenizer. Sizes of its encoder, see its config.json.
HF_MODEL=${HF_MODEL:-llava-new}
VOCAB_SIZE=${VOCAB_SIZE:-32064}
IMAGE_TOKEN=${IMAGE_TOKEN:-32000} # the placeholder
IMAGE_SIZE=${IMAGE_SIZE:-336}
IMAGE_TOKENS=${IMAGE_TOKENS:-576} # of an image: (336 / 14)^2

# Data: LLaVA's JSON or JSONL. Stage 1 is left out if CAPTIONS is empty.
CAPTIONS=${CAPTIONS-captions.json}
INSTRUCTIONS=${INSTRUCTIONS:-instructions.json}
IMAGES=${IMAGES:-images}         # folder in which their paths begin
CHAT_TEMPLATE=${CHAT_TEMPLATE:-} # empty: the one of HF_MODEL
SPLIT=${SPLIT:-99,1,0}           # training, validation, test

# Checkpoints: a run resumes from its own. EXPORT names a folder to write in the end, adapters merged; empty: none.
SAVE=${SAVE:-checkpoints/llava}
SAVE_INTERVAL=${SAVE_INTERVAL:-500}
EXPORT=${EXPORT:-}

# Training. Batch sizes are in samples of SEQ_LENGTH tokens, into each of which conversations are packed.
SEQ_LENGTH=${SEQ_LENGTH:-2048}
MICRO_BATCH=${MICRO_BATCH:-2}
GLOBAL_BATCH=${GLOBAL_BATCH:-64}
EPOCHS=${EPOCHS:-1}
CAPTIONS_LR=${CAPTIONS_LR:-1e-3}
LORA_RANK=${LORA_RANK:-0} # 0: all weights of the language model
LR=${LR:-$([ "$LORA_RANK" != 0 ] && echo 2e-4 || echo 2e-5)}
PRECISION=${PRECISION:-$([ "${DS_ACCELERATOR:-}" = cpu ] && echo fp32 || echo bf16)} # fp32, bf16 or fp16

# Layout. GPUS is the number of processes, also on CPUs. The projector alone cannot be trained in pipeline stages.
GPUS=${GPUS:-8}
MASTER_PORT=${MASTER_PORT:-29500}
TP=${TP:-1}
ZERO_STAGE=${ZERO_STAGE:-3}
CHECKPOINT_ACTIVATIONS=${CHECKPOINT_ACTIVATIONS:-1}

# DRY_RUN=1 prints the commands instead of running them.
HERE=$(realpath "$(dirname "$0")/..")
# shellcheck source=tools/dry_run.sh
source "$HERE/tools/dry_run.sh"
check_numbers 1 GPUS TP MASTER_PORT
check_numbers 0 ZERO_STAGE LORA_RANK

SWITCHES=()
switch "$CHECKPOINT_ACTIVATIONS" --checkpoint-activations
if [ "$PRECISION" != fp32 ]; then SWITCHES+=("--$PRECISION"); fi
ADAPTERS=()
if [ "$LORA_RANK" != 0 ]; then ADAPTERS=(--lora-rank "$LORA_RANK" --lora-alpha $((2 * LORA_RANK))); fi

TOKENIZER=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$HF_MODEL")

train() { # conversations, further flags of a stage
    local prefix
    prefix=${1%.json*}_$(basename "$HF_MODEL")${CHAT_TEMPLATE:+_$(basename "${CHAT_TEMPLATE%.*}")}
    if ! is_newer "${prefix}_images_document.idx" "$1" "$CHAT_TEMPLATE" \
        "$HF_MODEL"/{tokenizer.json,tokenizer_config.json,chat_template.jinja,additional_chat_templates/*.jinja}; then
        run python "$HERE/tools/preprocess_data.py" --format images --input "$1" --image-folder "$IMAGES" \
            --output-prefix "$prefix" "${TOKENIZER[@]}" ${CHAT_TEMPLATE:+--chat-template "$CHAT_TEMPLATE"} \
            --vision-image-size "$IMAGE_SIZE" --image-tokens "$IMAGE_TOKENS" --image-token-id "$IMAGE_TOKEN"
    fi
    run deepspeed --log_level critical --num_gpus "$GPUS" --master_port "$MASTER_PORT" "$HERE/pretrain_vlm.py" \
        "${TOKENIZER[@]}" --vocab-size "$VOCAB_SIZE" --freeze-vision --model-parallel-size "$TP" --zero-stage "$ZERO_STAGE" \
        --seq-length "$SEQ_LENGTH" --batch-size "$MICRO_BATCH" \
        --global-batch-size "$GLOBAL_BATCH" --epochs "$EPOCHS" --lr-decay-style cosine --warmup 0.03 --weight-decay 0 \
        --clip-grad 1.0 "${SWITCHES[@]}" --data-path "${prefix}_images_document" --split "$SPLIT" \
        --eval-interval "$SAVE_INTERVAL" --eval-iters 10 --save-interval "$SAVE_INTERVAL" --auto-resume "${@:2}"
}

START=(--load-hf "$HF_MODEL")
if [ -n "$CAPTIONS" ]; then
    train "$CAPTIONS" "${START[@]}" --freeze-language-model --lr "$CAPTIONS_LR" --save "$SAVE-projector" "$@"
    run python "$HERE/tools/convert_checkpoint.py" to-hf "$SAVE-projector" --output "$SAVE-projector-hf"
    START=(--load-hf "$SAVE-projector-hf")
fi
train "$INSTRUCTIONS" "${START[@]}" "${ADAPTERS[@]}" --lr "$LR" --save "$SAVE" "$@"
MERGE=$([ "$LORA_RANK" = 0 ] || echo --merge-lora)
if [ -n "$EXPORT" ]; then
    run python "$HERE/tools/convert_checkpoint.py" to-hf "$SAVE" ${MERGE:+"$MERGE"} --output "$EXPORT"
fi
