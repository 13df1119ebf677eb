#!/usr/bin/env bash
# Extend the context of a small Llama by YaRN, from 2,048 tokens to 8,192, on two CPU cores: train it on short sequences,
# train it a little on long ones, and compare its loss on held-out text with the model before.
#
#   bash examples/extend_context.sh          5 minutes of CPU time, without installation
#   bash examples/extend_context.sh --fast   from 256 tokens to 1,024, in a minute; shows the steps, not a good model
#   DRY_RUN=1 bash examples/extend_context.sh   prints the commands instead of running them
#
# Settings (environment variables):
OUT=${OUT:-extended}        # output folder; what is in it is replaced
FACTOR=${FACTOR:-4}         # how many times as long the sequences become
PROCESSES=${PROCESSES:-2}   # data-parallel ranks
MASTER_PORT=${MASTER_PORT:-29500}
set -euo pipefail
cd "$(dirname "$0")/.."

VOCABULARY=1024 SHORT=2048 ITERATIONS=200 MORE=40 LAYERS=2 HIDDEN=64 MEGABYTES=3
while (($#)); do
    case "$1" in
    --fast) VOCABULARY=300 SHORT=256 ITERATIONS=40 MORE=10 HIDDEN=32 MEGABYTES=0.3 && shift ;;
    -h | --help) sed -n '2,/^MASTER_PORT/p' "examples/$(basename "$0")" && exit ;;
    *) echo "$(basename "$0"): error: unknown argument ${1@Q}: see --help" >&2 && exit 2 ;;
    esac
done
# shellcheck source=tools/dry_run.sh
source tools/dry_run.sh
check_numbers 1 FACTOR PROCESSES MASTER_PORT
LONG=$((FACTOR * SHORT))

# shellcheck source=/dev/null
source tools/start_example.sh
hold_out() { # every twentieth document, for evaluation
    is_on "${DRY_RUN:-0}" DRY_RUN ||
        awk -v kept="$OUT/train.jsonl" -v held="$OUT/held-out.jsonl" '{print > (NR % 20 ? kept : held)}' "$OUT/corpus.jsonl"
}

step "a corpus from the documentation of this Python, a vocabulary of $VOCABULARY tokens, and the data set"
python tools/make_python_corpus.py --output "$OUT/corpus.jsonl" --max-megabytes "$MEGABYTES"
hold_out
python tools/train_tokenizer.py --input "$OUT/train.jsonl" --vocab-size "$VOCABULARY" --output-dir "$OUT"
TOKENIZER=(--tokenizer-type GPT2BPETokenizer --vocab-file "$OUT/vocab.json" --merge-file "$OUT/merges.txt")
python tools/preprocess_data.py --input "$OUT/train.jsonl" --output-prefix "$OUT/train" --append-eod "${TOKENIZER[@]}"

train() { # further flags of a run
    deepspeed --log_level critical --num_gpus "$PROCESSES" --master_port "$MASTER_PORT" pretrain_gpt2.py \
        --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads 4 --num-query-groups 2 --swiglu \
        --normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 \
        --min-lr 1e-4 --lr-decay-style cosine --warmup 0.1 --weight-decay 0.1 --zero-stage 1 \
        --data-path "$OUT/train_text_document" --split 98,2,0 --num-workers 0 --eval-iters 2 "${TOKENIZER[@]}" "$@"
}
loss() { # checkpoint, tokens of a sequence, what to call the result
    python tools/evaluate.py --task PPL --valid-data "$OUT/held-out.jsonl" --load "$OUT/$1" \
        --seq-length "$2" --overlapping-eval "$2" --json "$OUT/$3.json"
}

step "training on sequences of $SHORT tokens"
train --position-embedding-type rope --seq-length "$SHORT" --max-position-embeddings "$LONG" --batch-size 4 \
    --train-iters "$ITERATIONS" --lr 4e-3 --eval-interval $((ITERATIONS / 2)) --save "$OUT/short"

step "training on sequences of $LONG tokens, with positions by YaRN"
train --load "$OUT/short" --finetune --position-embedding-type yarn --yarn-rotary-scaling-factor "$FACTOR" \
    --yarn-original-max-position-embeddings "$SHORT" --seq-length "$LONG" --tiled-mlp --batch-size 1 \
    --train-iters "$MORE" --lr 1e-3 --eval-interval "$MORE" --save "$OUT/long"

step "held-out text: the model before at $SHORT tokens, beyond its context at $LONG, and the extended one"
loss short "$SHORT" before
loss short "$LONG" beyond
loss long "$LONG" extended
python - "$OUT" <<'PYTHON'
import json, sys
names = {"before": "before, short sequences", "beyond": "before, long sequences", "extended": "extended, long sequences"}
for name, words in names.items():
    print(f"{words:<26} loss {json.load(open(f'{sys.argv[1]}/{name}.json'))['loss']:.3f}")
PYTHON
