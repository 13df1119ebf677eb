#!/usr/bin/env bash
# Check the oldest and the newest torch that are supported, in environments of their own: every module can be imported,
# and GPT-2 trains on two processes, saves a checkpoint and resumes from it.
#
#   bash tests/torch_versions.sh FOLDER [VERSION ...]
#
# FOLDER keeps the environments, 6 GB for each version; a second run installs nothing. About five minutes each.
set -euo pipefail

FOLDER=$(realpath -m "${1:?usage: bash tests/torch_versions.sh FOLDER [VERSION ...]}")
cd "$(dirname "$0")/.."
versions=("${@:2}")
if [ $# = 1 ]; then # the oldest and the newest
    mapfile -t versions < <(sed -n 's/^\(OLDEST\|NEWEST\)_TORCH = "\(.*\)"$/\2/p' megatron/launch/environment.py)
fi
export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=
MODEL=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --mock-data --vocab-size 512 --batch-size 2 --lr 1e-3 --eval-iters 0 --log-interval 1 --lr-decay-iters 5)

environment() { # version
    [ -x "$FOLDER/$1/bin/python" ] || python3 -m venv "$FOLDER/$1"
    # Each version of torch has setuptools of its own.
    sed "s/^torch==.*/torch==$1.*/; s/^setuptools==[^ ]*/setuptools/" requirements.txt >"$FOLDER/requirements-$1.txt"
    "$FOLDER/$1/bin/pip" install --quiet --disable-pip-version-check -r "$FOLDER/requirements-$1.txt"
}

import_all() {
    python - <<'PROGRAM'
import importlib, pkgutil
import megatron

OPTIONAL = "lm_eval", "uvicorn"  # of requirements-test.txt
for module in pkgutil.walk_packages(megatron.__path__, "megatron."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
PROGRAM
}

train() { # layout and last iteration
    torchrun --nproc_per_node 2 pretrain_gpt2.py "${MODEL[@]}" --save "$folder" --load "$folder" "$@"
}

for version in "${versions[@]}"; do
    echo "== torch $version"
    environment "$version"
    folder=$(mktemp -d)
    (
        # shellcheck disable=SC1090,SC1091
        source "$FOLDER/$version/bin/activate"
        python -c 'import torch; print(torch.__version__)'
        import_all
        train --model-parallel-size 2 --train-iters 3 --save-interval 3
        train --pipe-parallel-size 2 --zero-stage 1 --train-iters 5 | tee "$folder/log"
        grep -q "iteration *5" "$folder/log"
    )
    rm -rf "$folder"
done
echo "== all imported, trained and resumed: torch ${versions[*]}"
