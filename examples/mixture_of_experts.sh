#!/usr/bin/env bash
# A mixture of experts compared with a dense model of as many active parameters, on the same text, on two CPU cores: both
# are trained on equally many tokens, the experts divided over two processes, and their validation losses are printed.
#
#   bash examples/mixture_of_experts.sh          about 4 minutes, without installation
#   bash examples/mixture_of_experts.sh --fast   in a minute; shows the steps, not a good model
#   DRY_RUN=1 bash examples/mixture_of_experts.sh   prints the commands instead of running them
#
# Settings (environment variables):
OUT=${OUT:-experts}         # output folder; what is in it is replaced
EXPERTS=${EXPERTS:-8}       # experts of each layer, of which 2 compute a token
SEEDS=${SEEDS:-1}           # of initial weights and the order of samples; several: "1 2 3"
PROCESSES=${PROCESSES:-2}   # data-parallel ranks, which divide the experts
MASTER_PORT=${MASTER_PORT:-29500}
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
source tools/output_folder.sh

VOCABULARY=2048 ITERATIONS=300 LAYERS=4 HIDDEN=128 MEGABYTES=4
while (($#)); do
    case "$1" in
    --fast) VOCABULARY=512 ITERATIONS=50 LAYERS=2 HIDDEN=64 MEGABYTES=0.5 && shift ;;
    *) sed -n '2,/^MASTER_PORT/p' "$0" >&2 && exit 2 ;;
    esac
done
# Inside a chosen expert is half of what is inside the dense MLP. The rest of that is as large as the router: a neuron has
# two weights for each of the hidden size, an expert one in the router.
INSIDE=$((2 * HIDDEN))
DENSE=$((2 * INSIDE + EXPERTS / 2))

if ((${DRY_RUN:-0})); then
    # shellcheck disable=SC1091
    source tools/dry_run.sh
    source() { quoted source "$@"; }
    mkdir() { quoted mkdir "$@"; }
    python() { quoted python "$@"; }
    deepspeed() { quoted deepspeed "$@"; }
fi

source tools/environment.sh requirements.txt
export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
mkdir -p "$OUT"
((${DRY_RUN:-0})) || lock_output_folder "$OUT"
((${DRY_RUN:-0})) || find "$OUT" -mindepth 1 -delete

step() { printf '\n== %s\n' "$*"; }

step "a corpus from the documentation of this Python, a vocabulary of $VOCABULARY tokens, and the data set"
python tools/make_python_corpus.py --output "$OUT/corpus.jsonl" --max-megabytes "$MEGABYTES"
python tools/train_tokenizer.py --input "$OUT/corpus.jsonl" --vocab-size "$VOCABULARY" --output-dir "$OUT"
TOKENIZER=(--tokenizer-type GPT2BPETokenizer --vocab-file "$OUT/vocab.json" --merge-file "$OUT/merges.txt")
python tools/preprocess_data.py --input "$OUT/corpus.jsonl" --output-prefix "$OUT/corpus" --append-eod "${TOKENIZER[@]}"

train() { # name, seed, further flags of a run
    deepspeed --log_level critical --num_gpus "$PROCESSES" --master_port "$MASTER_PORT" pretrain_gpt2.py \
        --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads 4 --seq-length 128 --disable-bias-linear \
        --attention-dropout 0 --hidden-dropout 0 --batch-size 8 --train-iters "$ITERATIONS" \
        --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --warmup 0.05 --weight-decay 0.1 --zero-stage 1 \
        --data-path "$OUT/corpus_text_document" --split 90,9,1 --num-workers 0 "${TOKENIZER[@]}" \
        --eval-interval $((ITERATIONS / 5)) --eval-iters 10 --seed "$2" --run-dir "$OUT/$1-$2" "${@:3}"
}

for seed in $SEEDS; do
    step "a dense model, seed $seed"
    train dense "$seed" --ffn-hidden-size "$DENSE"
    step "2 of $EXPERTS experts for each token, seed $seed"
    train experts "$seed" --num-experts "$EXPERTS" --moe-router-topk 2 --moe-ffn-hidden-size "$INSIDE" \
        --moe-aux-loss-coeff 0.01 --moe-per-layer-logging --expert-model-parallel-size "$PROCESSES" \
        --save "$OUT/experts-$seed/checkpoint"
    python tools/report.py "$OUT/experts-$seed"
done

step "validation losses in nats a token, the last and the lowest"
python - "$OUT" "$SEEDS" <<'PYTHON'
import json, sys
folder, seeds = sys.argv[1], sys.argv[2].split()
for seed in seeds:
    for name in ("dense", "experts"):
        lines = [json.loads(line) for line in open(f"{folder}/{name}-{seed}/metrics.jsonl")]
        losses = [line["validation_loss"] for line in lines if line.get("validation_loss") is not None]
        print(f"seed {seed}: {name:<8} {losses[-1]:.4f}  {min(losses):.4f}")
PYTHON
