#!/usr/bin/env bash
# From an empty folder to a trained GPT-2, or a small Llama, on two CPU cores: corpus, tokenizer, data set, training with tensor
# and pipeline parallelism, a plot of the loss, and a text generated with the trained weights.
#
#   bash examples/quickstart.sh          two minutes on two cores, after installation
#   bash examples/quickstart.sh --model llama   the same with the layers of Llama, and no more parameters
#   bash examples/quickstart.sh --fast   half a minute after installation; shows the steps, not a good model
#   DRY_RUN=1 bash examples/quickstart.sh   prints the commands instead of running them
#
# Settings (environment variables):
OUT=${OUT:-quickstart}   # output folder; what is in it is replaced
TP=${TP:-2}              # tensor-parallel size
PP=${PP:-2}              # pipeline stages, 0: no pipeline
PROCESSES=${PROCESSES:-} # empty: TP x PP
MASTER_PORT=${MASTER_PORT:-29500}
PROMPT=${PROMPT:-Return the}
set -euo pipefail
cd "$(dirname "$0")/.."

VOCABULARY=2048 ITERATIONS=600 LAYERS=4 HIDDEN=128 MEGABYTES=4 MODEL=gpt2
while (($#)); do
    case "$1 ${2:-}" in
    "--fast "*) VOCABULARY=512 ITERATIONS=120 LAYERS=2 HIDDEN=64 MEGABYTES=0.5 && shift ;;
    "--model gpt2" | "--model llama") MODEL=$2 && shift 2 ;;
    "-h "* | "--help "*) sed -n '2,/^PROMPT/p' "examples/$(basename "$0")" && exit ;;
    *) echo "$(basename "$0"): error: unknown argument ${1@Q}: see --help" >&2 && exit 2 ;;
    esac
done
KIND=(--num-attention-heads 4 --max-position-embeddings 128)
if [ "$MODEL" = llama ]; then # three times the hidden size in each of SwiGLU's matrices, and 2 key and value heads
    KIND=(--num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size $((3 * HIDDEN)) --swiglu
        --normalization RMSNorm --position-embedding-type rope --disable-bias-linear)
fi

# shellcheck source=tools/dry_run.sh
source tools/dry_run.sh
check_numbers 1 TP ${PROCESSES:+PROCESSES} MASTER_PORT
check_numbers 0 PP
PROCESSES=${PROCESSES:-$((TP * (PP > 1 ? PP : 1)))}

# shellcheck source=/dev/null
source tools/start_example.sh

step "a corpus from the documentation of this Python"
python tools/make_python_corpus.py --output "$OUT/corpus.jsonl" --max-megabytes "$MEGABYTES"

step "a byte-level BPE of $VOCABULARY tokens"
python tools/train_tokenizer.py --input "$OUT/corpus.jsonl" --vocab-size "$VOCABULARY" --output-dir "$OUT"

step "the data set: corpus_text_document.bin and .idx"
python tools/preprocess_data.py --input "$OUT/corpus.jsonl" --output-prefix "$OUT/corpus" --append-eod \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$OUT/vocab.json" --merge-file "$OUT/merges.txt" --workers 2

step "training on $PROCESSES processes: tensor parallel $TP x pipeline $PP"
deepspeed --log_level critical --num_gpus "$PROCESSES" --master_port "$MASTER_PORT" pretrain_gpt2.py \
    --model-parallel-size "$TP" --pipe-parallel-size "$PP" \
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" "${KIND[@]}" --seq-length 128 --attention-dropout 0 --hidden-dropout 0 \
    --batch-size 8 --gas 2 --train-iters "$ITERATIONS" \
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --warmup 0.05 --weight-decay 0.1 \
    --data-path "$OUT/corpus_text_document" --split 90,9,1 --num-workers 0 \
    --vocab-file "$OUT/vocab.json" --merge-file "$OUT/merges.txt" \
    --eval-interval $((ITERATIONS / 5)) --eval-iters 4 \
    --save "$OUT/checkpoints" --metrics-file "$OUT/metrics.jsonl" --tensorboard-dir "$OUT/tensorboard"

step "loss compared with the unigram entropy of the corpus"
# The loss of a model that knows how often each token occurs, and nothing else.
ENTROPY=$(python - "$OUT/corpus_text_document.bin" <<'PYTHON'
import sys, numpy
counts = numpy.bincount(numpy.fromfile(sys.argv[1], numpy.uint16))
shares = counts[counts > 0] / counts.sum()
print(f"{-(shares * numpy.log(shares)).sum():.4f}")
PYTHON
)
python tools/plot_metrics.py "$OUT/metrics.jsonl" --output "$OUT/loss.png" --baseline "unigram entropy=$ENTROPY"
python - "$OUT/metrics.jsonl" "$ENTROPY" <<'PYTHON'
import json, sys
losses = [json.loads(line).get("validation_loss") for line in open(sys.argv[1])]
print(f"validation loss {[loss for loss in losses if loss is not None][-1]:.3f} nats a token; unigram entropy of the corpus {float(sys.argv[2]):.3f}")
PYTHON

step "text generated from the prompt: $PROMPT"
python tools/generate.py --load "$OUT/checkpoints" --prompt "$PROMPT" --new-tokens 60 --temperature 0.7 --top-k 40

step "done: loss curve in $OUT/loss.png, checkpoint in $OUT/checkpoints"
