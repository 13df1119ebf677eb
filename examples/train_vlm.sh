#!/usr/bin/env bash
# From an empty folder to a small vision-language model on two CPU cores: pictures of shapes and questions about them
# ("What is left of the blue square?"), tokenizer, two stages of training with tensor parallelism, evaluation, also with
# the pixels of each picture in random order, and a picture of some answers.
#
#   bash examples/train_vlm.sh          three minutes on two idle cores, after installation
#   bash examples/train_vlm.sh --fast   shows the steps, not a good model
#   TP=1 PP=2 bash examples/train_vlm.sh   with two pipeline stages instead
#   DRY_RUN=1 bash examples/train_vlm.sh   prints the commands instead of running them
#
# Nothing here is trained before, so stage 1, on captions, trains the encoder of images, the projector and the language
# model; from published weights it trains the projector only (examples/finetune_llava.sh). Stage 2, on questions, trains
# projector and language model, and the encoder is frozen.
#
# Settings (environment variables):
OUT=${OUT:-shapes}       # output folder; what is in it is replaced
TP=${TP:-2}              # tensor-parallel size
PP=${PP:-0}              # pipeline stages, 0: no pipeline
MASTER_PORT=${MASTER_PORT:-29500}
set -euo pipefail
cd "$(dirname "$0")/.."

PICTURES=8000 CAPTIONS=200 QUESTIONS=700 TESTS=250
while (($#)); do
    case "$1" in
    --fast) PICTURES=200 CAPTIONS=4 QUESTIONS=4 TESTS=10 && shift ;;
    -h | --help) sed -n '2,/^MASTER_PORT/p' "examples/$(basename "$0")" && exit ;;
    *) echo "$(basename "$0"): error: unknown argument ${1@Q}: see --help" >&2 && exit 2 ;;
    esac
done
# shellcheck source=tools/dry_run.sh
source tools/dry_run.sh
check_numbers 1 TP MASTER_PORT
check_numbers 0 PP
PROCESSES=$((TP * (PP > 1 ? PP : 1)))

# shellcheck source=/dev/null
source tools/start_example.sh

step "$PICTURES pictures of shapes, with captions and questions"
python examples/draw_shapes.py "$OUT" --pictures "$PICTURES" --test-pictures "$TESTS" --size 32

step "a byte-level BPE of 320 tokens, and the data sets: tokens with 4 placeholders for each picture, and pixels"
python tools/train_tokenizer.py --input "$OUT/corpus.jsonl" --vocab-size 320 --output-dir "$OUT"
TOKENIZER=(--tokenizer-type GPT2BPETokenizer --vocab-file "$OUT/vocab.json" --merge-file "$OUT/merges.txt")
PLACEHOLDER=1 # the double quote, which is in no text
for name in captions questions; do
    python tools/preprocess_data.py --format images --input "$OUT/$name.jsonl" --image-folder "$OUT" \
        --output-prefix "$OUT/$name" --chat-template examples/chat_template.jinja "${TOKENIZER[@]}" \
        --vision-image-size 32 --image-tokens 4 --image-token-id "$PLACEHOLDER"
done

LAYOUT=(--model-parallel-size "$TP" --pipe-parallel-size "$PP")
if ((PP == 2)); then LAYOUT+=(--pipeline-partition "3,2"); fi # the encoder and a layer of the language model come first
train() { # name, iterations, further flags of a stage
    deepspeed --log_level critical --num_gpus "$PROCESSES" --master_port "$MASTER_PORT" pretrain_vlm.py "${LAYOUT[@]}" \
        --vision-encoder siglip --vision-num-layers 2 --vision-hidden-size 96 --vision-ffn-hidden-size 256 \
        --vision-num-attention-heads 4 --vision-image-size 32 --vision-patch-size 16 --vision-feature-layer -1 \
        --vision-feature-select-strategy full --image-token-id "$PLACEHOLDER" \
        --num-layers 3 --hidden-size 96 --ffn-hidden-size 256 --num-attention-heads 4 --swiglu --normalization RMSNorm \
        --position-embedding-type rope --disable-bias-linear --init-method-std 0.1 --seq-length 256 \
        --attention-dropout 0 --hidden-dropout 0 --batch-size 8 --train-iters "$2" --lr 3e-3 --min-lr 1e-4 \
        --lr-decay-style cosine --warmup 0.05 --weight-decay 0.1 --adam-beta2 0.95 \
        --data-path "$OUT/${1}_images_document" --split 98,2,0 --num-workers 0 "${TOKENIZER[@]}" --log-interval 50 \
        --eval-interval 100 --eval-iters 5 --run-dir "$OUT/$1-run" --save "$OUT/$1-run/checkpoints" "${@:3}"
}

step "stage 1: captions"
train captions "$CAPTIONS"

step "stage 2: questions, with the encoder frozen"
train questions "$QUESTIONS" --load "$OUT/captions-run/checkpoints" --finetune --freeze-vision

for name in test shuffled; do
    step "answers to $name.jsonl"
    python tools/evaluate.py --task VQA --valid-data "$OUT/$name.jsonl" --load "$OUT/questions-run/checkpoints" \
        --batch-size 64 --new-tokens 8 --predictions "$OUT/$name-answers.jsonl" --json "$OUT/$name-accuracy.json"
done
python tools/report.py "$OUT/questions-run" --predictions "$OUT/test-answers.jsonl"
python examples/draw_answers.py "$OUT/test-answers.jsonl" --output "$OUT/answers.png"

step "accuracy, of pictures, of pictures with shuffled pixels, and of the most frequent answer"
python - "$OUT" <<'PYTHON'
import json, sys
test, shuffled = (json.load(open(f"{sys.argv[1]}/{name}-accuracy.json")) for name in ("test", "shuffled"))
print(f"{test['accuracy']:.1%} of {test['questions']}, {shuffled['accuracy']:.1%}, {test['most_frequent_answer']:.1%}")
PYTHON

step "done: answers in $OUT/answers.png and $OUT/questions-run/report.html, checkpoint in $OUT/questions-run/checkpoints"
