#!/usr/bin/env bash
# A mixture of experts compared with a dense model of as many active parameters, on the same text, on two CPU cores: both
# are trained on equally many tokens, the experts divided over two processes, and their validation losses are compared.
#
#   bash examples/mixture_of_experts.sh          about 4 minutes, without installation
#   bash examples/mixture_of_experts.sh --long   three seeds of twice as many iterations, half an hour
#   bash examples/mixture_of_experts.sh --fast   in a minute; shows the steps, not a good model
#   DRY_RUN=1 bash examples/mixture_of_experts.sh   prints the commands instead of running them
#
# Settings (environment variables):
OUT=${OUT:-experts}         # output folder; what is in it is replaced
EXPERTS=${EXPERTS:-8}       # experts of each layer, of which 2 compute a token
SEEDS=${SEEDS:-}            # of initial weights and the order of samples: 1, with --long "1 2 3"
LR=${LR:-3e-3}              # largest learning rate of both models
AUX_LOSS=${AUX_LOSS:-0.01}  # weight of the load balancing loss
PROCESSES=${PROCESSES:-2}   # data-parallel ranks, which divide the experts: the losses are the same with 1
MASTER_PORT=${MASTER_PORT:-29500}
set -euo pipefail
cd "$(dirname "$0")/.."

VOCABULARY=2048 ITERATIONS=300 LAYERS=4 HIDDEN=128 MEGABYTES=4 DEFAULT_SEEDS=1
while (($#)); do
    case "$1" in
    --long) DEFAULT_SEEDS="1 2 3" ITERATIONS=600 && shift ;;
    --fast) VOCABULARY=512 ITERATIONS=50 LAYERS=2 HIDDEN=64 MEGABYTES=0.5 && shift ;;
    -h | --help) sed -n '2,/^MASTER_PORT/p' "examples/$(basename "$0")" && exit ;;
    *) echo "$(basename "$0"): error: unknown argument ${1@Q}: see --help" >&2 && exit 2 ;;
    esac
done
SEEDS=${SEEDS:-$DEFAULT_SEEDS}
# shellcheck source=tools/dry_run.sh
source tools/dry_run.sh
check_numbers 1 EXPERTS PROCESSES MASTER_PORT
# Inside a chosen expert is half of what is inside the dense MLP. The rest of that is as large as the router: a neuron has
# two weights for each of the hidden size, an expert one in the router.
INSIDE=$((2 * HIDDEN))
DENSE=$((2 * INSIDE + EXPERTS / 2))

# shellcheck source=/dev/null
source tools/start_example.sh

step "a corpus from the documentation of this Python, a vocabulary of $VOCABULARY tokens, and the data set"
python tools/make_python_corpus.py --output "$OUT/corpus.jsonl" --max-megabytes "$MEGABYTES"
python tools/train_tokenizer.py --input "$OUT/corpus.jsonl" --vocab-size "$VOCABULARY" --output-dir "$OUT"
TOKENIZER=(--tokenizer-type GPT2BPETokenizer --vocab-file "$OUT/vocab.json" --merge-file "$OUT/merges.txt")
python tools/preprocess_data.py --input "$OUT/corpus.jsonl" --output-prefix "$OUT/corpus" --append-eod "${TOKENIZER[@]}"

train() { # name, seed, further flags of a run
    deepspeed --log_level critical --num_gpus "$PROCESSES" --master_port "$MASTER_PORT" pretrain_gpt2.py \
        --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads 4 --seq-length 128 --disable-bias-linear \
        --position-embedding-type rope --normalization RMSNorm \
        --attention-dropout 0 --hidden-dropout 0 --batch-size $((16 / PROCESSES)) --train-iters "$ITERATIONS" \
        --lr "$LR" --min-lr 1e-4 --lr-decay-style cosine --warmup 0.05 --weight-decay 0.1 --adam-beta2 0.95 --zero-stage 1 \
        --data-path "$OUT/corpus_text_document" --split 90,9,1 --num-workers 0 "${TOKENIZER[@]}" \
        --eval-interval $((ITERATIONS / 5)) --eval-iters 10 --seed "$2" --run-dir "$OUT/$1-$2" "${@:3}"
}

for seed in $SEEDS; do
    step "a dense model, seed $seed"
    train dense "$seed" --ffn-hidden-size "$DENSE"
    step "2 of $EXPERTS experts for each token, seed $seed"
    train experts "$seed" --num-experts "$EXPERTS" --moe-router-topk 2 --moe-ffn-hidden-size "$INSIDE" \
        --moe-aux-loss-coeff "$AUX_LOSS" --moe-per-layer-logging --expert-model-parallel-size "$PROCESSES" \
        --save "$OUT/experts-$seed/checkpoint"
    python tools/report.py "$OUT/experts-$seed"
done

step "validation losses, and the test loss, in nats a token"
python - "$OUT" "$SEEDS" <<'PYTHON'
import json, math, sys

folder, seeds = sys.argv[1], sys.argv[2].split()


def losses(name, seed):
    """Validation losses by iteration, then the test loss. One that is not finite is null in the file."""
    found = {}
    for line in map(json.loads, open(f"{folder}/{name}-{seed}/metrics.jsonl")):
        for key, row in (("validation_loss", line["iteration"]), ("test_loss", "test")):
            if key in line:
                found[row] = math.nan if line[key] is None else line[key]
    return found


runs = [(losses("dense", seed), losses("experts", seed)) for seed in seeds]
print("iteration  " + "  ".join(f"{'seed ' + seed + ':':<8}  dense  experts" for seed in seeds))
for row in runs[0][0]:
    print(f"{row:>9}  " + "  ".join(f"{dense[row]:15.3f}  {experts[row]:7.3f}" for dense, experts in runs))
last = max(row for row in runs[0][0] if row != "test")
gains = [dense[last] - experts[last] for dense, experts in runs]
print(f"with experts the last validation loss is lower with {sum(gain > 0 for gain in gains)} of {len(gains)} seeds, "
      f"in the mean by {sum(gains) / len(gains):.3f}")
PYTHON
