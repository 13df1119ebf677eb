#!/usr/bin/env bash
# Build NVIDIA's apex for the torch that is installed, compare its norms and Adam with torch's on the GPU, and train
# with --fused-kernels apex. For a CUDA image without apex, which has nvcc, git and torch; NGC's images have apex.
#
#   docker run --gpus all -it --volume "$PWD:/project" --workdir /project nvidia/cuda:13.0.1-devel-ubuntu24.04
#   apt-get update && apt-get install --yes git python3-dev python3-venv && python3 -m venv /venv && . /venv/bin/activate
#   pip install -r requirements.txt && bash docker/build_apex.sh
#
# APEX is the branch, tag or commit to build. Without a GPU, as in the build of an image, TORCH_CUDA_ARCH_LIST=9.0 names
# the compute capability to build for, and nothing is compared.
set -euo pipefail
cd "$(dirname "$0")/.."
APEX=${APEX:-master}

fail() { echo "build_apex.sh: $*" >&2 && exit 2; }
for program in git nvcc python; do
    command -v "$program" >/dev/null || fail "$program is missing: start in an image with CUDA's development files"
done
wanted=$(python -c 'import torch; print(torch.version.cuda or "")') || fail "torch is missing: install requirements.txt"
[[ -n $wanted && $(nvcc --version) == *"release $wanted,"* ]] || fail "torch is built for CUDA '$wanted', and nvcc is not"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone --quiet https://github.com/NVIDIA/apex "$folder/apex"
git -C "$folder/apex" checkout --quiet "$APEX"
python -m pip install setuptools wheel ninja packaging
APEX_CPP_EXT=1 APEX_CUDA_EXT=1 NVCC_APPEND_FLAGS="--threads 4" \
    python -m pip install --verbose --no-build-isolation --no-cache-dir --no-deps "$folder/apex"
commit=$(git -C "$folder/apex" rev-parse HEAD)
python -c 'import torch, amp_C, fused_layer_norm_cuda' || fail "apex was built, and its kernels cannot be loaded"
if ! python -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
    echo "built from commit $commit; its kernels load. There is no GPU here to compare them on"
    exit
fi

python - <<'PYTHON'
import torch
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.optimizers import FusedAdam

torch.manual_seed(1)
hidden = torch.randn(64, 1024, device="cuda")
for fused, plain in ((FusedLayerNorm, torch.nn.LayerNorm), (FusedRMSNorm, torch.nn.RMSNorm)):
    ours, theirs = fused(1024, eps=1e-5).cuda()(hidden), plain(1024, eps=1e-5).cuda()(hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
weights = [torch.nn.Parameter(torch.ones(1024, device="cuda")) for _ in range(2)]
optimizers = [FusedAdam(weights[:1], lr=1e-3, weight_decay=0.1), torch.optim.AdamW(weights[1:], lr=1e-3, weight_decay=0.1)]
for step in range(5):
    for weight, optimizer in zip(weights, optimizers):
        weight.grad = hidden[step].clone()
        optimizer.step()
torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
print("apex's norms and Adam agree with torch's")
PYTHON
for kernels in torch apex; do
    python pretrain_gpt2.py --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --batch-size 4 \
        --train-iters 20 --lr 0.001 --log-interval 10 --eval-iters 0 --bf16 --mock-data --vocab-size 1000 \
        --attention-dropout 0 --hidden-dropout 0 --fused-kernels "$kernels"
done
echo "built from commit $commit: the losses of both runs must agree within rounding"
