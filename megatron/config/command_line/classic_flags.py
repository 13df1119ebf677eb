"""What becomes of the flags of the classic suites, which a script written for one of them may contain. No torch here.

The suites are Megatron-LM, Megatron-DeepSpeed, DeepSpeed's 3D-parallelism example (Megatron-LM v1.1.5) and Megatron for
Ascend NPUs. Most of their flags are flags here, under the same name or as an alias in ``megatron/config``: see
``UNCHANGED``. The tables below have the others: those that ask for what happens in any case (fulfilled), those without
effect (ignored, with a warning), and those that are refused. docs/classic-flags.md is generated from them. A name may
end with ``*`` for a family of flags, or with ``=value`` for one value of a flag; the most specific name counts.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple


class Outcome(NamedTuple):
    """What becomes of a classic flag."""

    kind: str
    """``replaced``, ``fulfilled``, ``ignored`` or ``refused``."""
    text: str
    """The flag that replaces it; what happens in any case, or instead; why it is refused, and what to use."""


UNCHANGED = """
num-layers hidden-size ffn-hidden-size num-attention-heads max-position-embeddings make-vocab-size-divisible-by
layernorm-epsilon norm-epsilon apply-residual-connection-post-layernorm openai-gelu bias-gelu-fusion
no-bias-gelu-fusion bias-dropout-fusion no-bias-dropout-fusion gradient-accumulation-fusion
no-gradient-accumulation-fusion scaled-upper-triang-masked-softmax-fusion attention-dropout hidden-dropout
init-method-std apply-query-key-layer-scaling no-query-key-layer-scaling attention-softmax-in-fp32
fp16-lm-cross-entropy fp32-residual-connection use-cpu-initialization shape-order pre-tockens next-tockens lr min-lr
lr-decay-style lr-decay-iters lr-decay-samples warmup lr-warmup-fraction lr-warmup-iters lr-warmup-samples
lr-wsd-decay-style lr-wsd-decay-iters weight-decay clip-grad optimizer adam-beta1 adam-beta2 adam-eps sgd-momentum
muon-momentum muon-nesterov muon-use-nesterov muon-no-nesterov muon-no-use-nesterov muon-num-ns-steps
muon-coefficient-type muon-scale-mode muon-extra-scale-factor muon-split-qkv muon-no-split-qkv override-lr-scheduler
use-checkpoint-lr-scheduler override-opt-param-scheduler use-checkpoint-opt-param-scheduler batch-size
micro-batch-size gas global-batch-size train-iters train-samples exit-interval exit-duration-in-mins eval-iters
eval-interval seed fp16 bf16 loss-scale initial-loss-scale loss-scale-window hysteresis min-scale min-loss-scale
fp32-allreduce accumulate-allreduce-grads-in-fp32 zero-stage use-distributed-optimizer zero-reduce-scatter
zero-contigious-gradients zero-reduce-bucket-size ddp-bucket-size zero-allgather-bucket-size cpu-optimizer
optimizer-cpu-offload cpu-torch-adam use-torch-optimizer-for-cpu-offload remote-device checkpoint-activations
deepspeed-activation-checkpointing recompute-activations recompute-granularity checkpoint-num-layers
recompute-num-layers activations-checkpoint-num-layers partition-activations distribute-checkpointed-activations
distribute-saved-activations contigious-checkpointing checkpoint-in-cpu synchronize-each-layer profile-backward
model-parallel-size tensor-model-parallel-size pipe-parallel-size pipeline-model-parallel-size no-pipeline-parallel
sequence-parallel ds-sequence-parallel-size distributed-backend distributed-timeout-minutes local-rank deepspeed
deepspeed-config deepscale deepscale-config data-path train-data-path valid-data-path test-data-path split
data-cache-path mock-data vocab-size
no-shared-storage data-impl mmap-warmup num-workers seq-length tokenizer-type tokenizer-model vocab-file merge-file
reset-position-ids reset-attention-mask eod-mask-loss mask-prob short-seq-prob save save-interval
persistent-save-interval no-save-optim no-save-rng async-save load no-load-optim no-load-rng finetune log-interval
tensorboard-dir rampup-batch-size step-batch-size-schedule lr-wsd-decay-samples log-params-norm log-num-zeros-in-grad
timing-log-level log-timers-to-tensorboard normalization swiglu position-embedding-type
use-rotary-position-embeddings no-position-embedding rotary-base rotary-position-embeddings-theta rotary-percent
use-rope-scaling rope-scaling-factor group-query-attention num-query-groups num-key-value-heads kv-channels
disable-bias-linear add-qkv-bias qk-layernorm untie-embeddings-and-output-weights encoder-num-layers
decoder-num-layers encoder-seq-length decoder-seq-length vocab-extra-ids pipeline-model-parallel-split-rank
relative-attention-num-buckets relative-attention-max-distance rotary-seq-len-interpolation-factor
yarn-rotary-scaling-factor yarn-original-max-position-embeddings yarn-beta-fast yarn-beta-slow yarn-mscale
yarn-mscale-all-dim yarn-correction-range-round-to-int no-yarn-correction-range-round-to-int window-size
num-experts moe-layer-freq moe-ffn-hidden-size
moe-router-topk topk moe-router-pre-softmax moe-router-load-balancing-type moe-aux-loss-coeff moe-loss-coeff
moe-z-loss-coeff moe-router-dtype moe-expert-capacity-factor moe-shared-expert-intermediate-size moe-grouped-gemm
moe-per-layer-logging
expert-model-parallel-size moe-expert-parallel-size expert-tensor-parallel-size
""".split()
"""Flags of the classic suites that are flags here, or aliases of one."""

_REPLACED = {
    "--checkpoint-activations": "activations-checkpoint-method=uniform",
    "--normalization LayerNorm": "normalization=layernorm",
    "--normalization RMSNorm": "normalization=rmsnorm",
}

_FULFILLED = {
    "Muon gathers whole matrices over the tensor-parallel ranks": "muon-tp-mode=duplicated",
    "the parameters that Muon does not update are AdamW's": "muon-scalar-optimizer=adam",
    "a signal always saves and ends the run": "exit-signal-handler",
    "the layers that are recomputed together are counted from the first one on": "recompute-method=uniform",
    "samples are shuffled for each epoch, and epochs repeat until the end of training": "dataloader-type=single",
    "the loss is averaged over all tokens of the global batch": "calculate-per-token-loss",
    "throughput is always logged": "log-throughput op-cal-tflops",
    "offloaded state is page-locked by default": "use-pin-memory",
    "memory is never emptied": "empty-unused-memory-level=0",
    "processes of mpirun are recognized": "deepspeed-mpi",
    "this is the default of both models": (
        "softmax-type=vanilla transformer-impl=local weight-decay-incr-style=constant"
    ),
    "experts receive their tokens by all-to-all": "moe-token-dispatcher-type=alltoall",
    "the weights of experts are a softmax of the router's logits": "moe-router-score-function=softmax",
    "tokens with the smallest weights are dropped": "moe-token-drop-policy=probs",
    "no token is dropped without --moe-expert-capacity-factor": "disable-moe-token-dropping",
    "experts have a parameter group of their own with expert parallelism": "create-moe-param-group",
    "this is the size without this kind of parallelism or layer": "vocab-extra-ids=0",
}

_IGNORED = {
    "attention is torch's fused kernel (FlashAttention on CUDA) unless another flag excludes it; "
    "--scaled-upper-triang-masked-softmax-fusion requires it": (
        "use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder "
        "attention-backend=flash attention-backend=fused attention-backend=auto scaled-masked-softmax-fusion "
        "no-masked-softmax-fusion use-fusion-attn-v2"
    ),
    "the attention mask follows from --pre-tokens and --reset-attention-mask": (
        "sparse-mode=0 sparse-mode=2 sparse-mode=3 sparse-mode=4 attention-mask-type=causal "
        "attention-mask-on-cpu no-create-attention-mask-in-dataloader"
    ),
    "kernels are chosen by --fused-kernels, --bias-gelu-fusion, --bias-dropout-fusion and --compile": (
        "transformer-impl=transformer_engine use-mcore-models use-legacy-models no-persist-layer-norm "
        "no-bias-swiglu-fusion no-rope-fusion disable-mem-efficient-ln use-te-activation-func "
        "cross-entropy-loss-fusion cross-entropy-fusion-impl no-clone-scatter-output-in-embedding jit-compile "
        "optimization-level use-fused-rmsnorm use-fused-swiglu use-fused-rotary-pos-emb"
    ),
    "AdamW is torch's or apex's by --fused-kernels": "torch-adam ds-fused-adam optimizer-selection",
    "Muon's iterations are in bf16 with --bf16, otherwise in fp32": "muon-fp32-matmul-prec",
    "DeepSpeed reduces gradients, in buckets of --zero-reduce-bucket-size": (
        "DDP-impl=local DDP-impl=torch use-contiguous-buffers-in-local-ddp no-contiguous-buffers-in-local-ddp "
        "ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw ddp-average-in-collective "
        "no-gradient-reduce-div-fusion no-align-grad-reduce no-align-param-gather delay-grad-reduce "
        "no-delay-grad-reduce delay-param-gather no-delay-param-gather"
    ),
    "tokens are arranged for the experts by torch's kernels": "moe-permute-fusion moe-router-fusion",
    "--zero-overlap-comm overlaps communication with computation": (
        "overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step "
        "overlap-cpu-optimizer-d2h-h2d"
    ),
    "DeepSpeed's pipeline engine decides how tensors are sent between stages": (
        "no-scatter-gather-tensors-in-pipeline overlap-p2p-communication no-overlap-p2p-communication "
        "overlap-p2p-communication-warmup-flush use-ring-exchange-p2p "
        "microbatch-group-size-per-virtual-pipeline-stage use-multiparameter-pipeline-model-parallel "
        "optimize-send-recv-comm optimize-vpp-send-recv-comm"
    ),
    "tensor-parallel communication is not overlapped": (
        "no-async-tensor-model-parallel-allreduce tp-comm-* disable-tp-comm-* decoder-tp-comm-overlap "
        "use-ascend-coc use-ascend-mc2 coc-* enable-overlap-ag-with-matmul enable-overlap-matmul-with-rs "
        "enable-backward-overlap-ag-with-matmul"
    ),
    "process groups and backends are those of the parallel layout": (
        "enable-gloo-process-groups disable-gloo-process-groups disable-gloo-group high-priority-stream-groups "
        "nccl-communicator-config-path hccl-slice-size use-nccl-ub use-sharp sharp-enabled-group "
        "disable-symmetric-registration distributed-timeout-seconds-after-init"
    ),
    "ZeRO shards the fp32 copy of the weights: see --zero-stage": "reuse-fp32-param",
    "the allocator keeps freed memory; against fragmentation set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True": (
        "empty-unused-memory-level memory-fragmentation"
    ),
    "samples are shuffled for each epoch, and epochs repeat until the end of training (data sets of pretrain() are "
    "not shuffled)": "dataloader-type=cyclic repeated-dataloader",
    "data sets are memory-mapped, and built by one thread": (
        "no-mmap-bin-files num-dataset-builder-threads mid-level-dataset-surplus dataloader-fast-cache-load "
        "dataloader-defer-npy-index-mmap"
    ),
    "Python decides when garbage is collected": "manual-gc manual-gc-interval no-manual-gc-eval",
    "TensorBoard gets every metric of every logged iteration: see --log-interval": (
        "tensorboard-log-interval tensorboard-queue-size log-batch-size-to-tensorboard "
        "no-log-learnig-rate-to-tensorboard no-log-learning-rate-to-tensorboard "
        "no-log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard "
        "log-world-size-to-tensorboard"
    ),
    "--metrics-file and --run-dir have the progress and the configuration of a run": (
        "log-progress logging-level config-logger-dir"
    ),
    "metrics are written to --metrics-file and --tensorboard-dir": ("wandb-* log-energy"),
    "the optimizer's state is not logged: see --log-params-norm and --log-num-zeros-in-grad": (
        "log-optimizer-states-to-tensorboard log-max-attention-logit"
    ),
    "--timing-log-level prints the least and the greatest time of all ranks": (
        "timing-log-option no-barrier-with-level-1-timing"
    ),
    "--straggler-report names slow hosts": "log-straggler disable-straggler-on-startup straggler-*",
    "--rewind-on-spike handles spikes": "check-for-spiky-loss check-for-large-grads",
    "losses and gradient norms are always checked: see --max-consecutive-bad-steps": (
        "no-check-for-nan-in-loss-and-grad rerun-mode result-rejected-tracker-filename"
    ),
    "checkpoints have DeepSpeed's format, and any layout can load them": (
        "ckpt-format use-dist-ckpt dist-ckpt-* auto-detect-ckpt-format ckpt-fully-parallel-save "
        "no-ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure "
        "use-persistent-ckpt-worker universal-checkpoint distrib-optim-fully-reshardable-mem-efficient "
        "no-strict-fsdp-dtensor-load checkpoint-io-buffer-size checkpoint-data-parallel "
        "checkpoint-writer-decoupled aio-intra-op-parallelism"
    ),
    "a --load folder without a checkpoint ends the run, unless it is the --save folder": "exit-on-missing-checkpoint",
    "weights are initialized before a checkpoint is loaded": "no-initialization init-model-with-meta-device",
    "it is for text generation: see tools/generate.py": (
        "inference-batch-times-seqlen-threshold max-tokens-to-oom flash-decode"
    ),
    "it is a service of NVIDIA's own cluster": "no-one-logger one-logger-* app-tag-*",
}

_REFUSED = {
    # Architectures other than GPT-2, the Llama family, BERT and T5.
    "rotation by other rules than Llama's and YaRN's is not supported: remove it": (
        "rotary-* rope-* no-rope-freq mrope-section original-max-position-embeddings low-freq-factor high-freq-factor"
    ),
    "not a part of GPT-2, Llama, BERT or T5: remove it": (
        "quick-geglu glu-linear-offset activation-func-clamp-value qk-l2-norm add-dense-bias skip-bias-add "
        "squared-relu apply-layernorm-1p softmax-type "
        "embedding-init-method-std square-alibi-mask alibi-* fill-neg-inf transformer-impl attention-output-gate "
        "linear-attention-* experimental-attention-variant dsa-*"
    ),
    "all layers have the attention window of --pre-tokens: use it": "window-attn-skip-freq sliding-window",
    "layers with experts are chosen by --moe-layer-freq: use it": "expert-interval",
    "tokens are dropped by --moe-expert-capacity-factor: use it": "moe-train-capacity-factor moe-eval-capacity-factor",
    "not a part of the mixture of experts here: remove it": (
        "moe-* disable-moe-* mlp-type enable-expert-tensor-parallelism num-experts-switch "
        "use-tutel overlap-moe-expert-parallel-comm delay-wgrad-compute "
        "n-shared-experts noisy-gate-policy use-pipe-experts pipe-experts-* ampipe-* "
        "use-fused-moe-token-permute-and-unpermute use-fused-weighted-squared-relu no-use-rts "
        "enable-token-rearrange-opt"
    ),
    "there is no multi-latent attention, multi-token prediction or state-space layer: remove it": (
        "multi-latent-attention multi-head-latent-attention q-lora-rank kv-lora-rank qk-* v-head-dim mscale "
        "mscale-all-dim cache-mla-latents mtp-* mamba-* hybrid-* is-hybrid-model disable-mamba-mem-eff-path "
        "heterogeneous-* spec"
    ),
    "there are no retrieval models: remove it": (
        "ict-head-size ict-load bert-load titles-data-path query-in-block-prob use-one-sent-docs "
        "report-topk-accuracies faiss-use-gpu block-data-path indexer-batch-size indexer-log-interval "
        "biencoder-* evidence-data-path embedding-path retriever-* retro-*"
    ),
    "there are no vision models: remove it": (
        "num-classes img-h img-w num-channels patch-dim classes-fraction data-per-class-fraction "
        "no-data-sharding head-lr-mult vision-* swin-backbone-type mask-type mask-factor iter-per-epoch "
        "dino-*"
    ),
    "BERT is trained with its sentence-order head: remove it": (
        "bert-no-binary-head output-bert-embeddings bert-embedder-type"
    ),
    "weight sharing between layers is not supported: remove it": "num-unique-layers param-sharing-style",
    "distillation is not supported: remove it": "mos kd kd-* *-teacher reset-iteration",
    "reinforcement learning is not supported: remove it": "perform-rl-step rl-* grpo-* langrl-*",
    "tools/preprocess_data.py formats conversations, by a chat template: remove it": "sft-*",
    # Parallelism, memory and precision.
    "context parallelism is --context-parallel-size with --cp-comm-type p2p, all_gather, a2a or a2a+p2p: use it": (
        "context-parallel-* megatron-cp-* cp-* "
        "ulysses-degree-in-cp use-cp-* adaptive-cp-* use-fused-ring-attention-update "
        "ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-* force-ds-sequence-parallel"
    ),
    "this pipeline schedule is not supported: choose one by --pipeline-schedule": (
        "enable-zbh1-exact-semantics use-nanopipe use-nanopipe-swap"
    ),
    "the layers of each stage are chosen by --pipeline-partition: use it": (
        "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout "
        "standalone-embedding-stage account-for-embedding-in-pipeline-split "
        "account-for-loss-in-pipeline-split noop-layers automated-pipeline automated-pipeline-perf "
        "save-memory-ratio num-layer-list optimized-mbs-list optimized-mbs-mode mbs-idx pp-schedule-list"
    ),
    "all layers are recomputed, in whole or in part, or none: use --recompute-granularity full or selective, and "
    "--checkpoint-num-layers for layers that are recomputed together": (
        "recompute-method recompute-modules activations-checkpoint-method adaptive-recompute-* "
        "recompute-activation-function recompute-activation-function-num-layers recompute-norm "
        "recompute-norm-num-layers recompute-module-list recompute-type recompute-in-bubble recompute-in-advance "
        "enable-recompute-layers-per-pp-rank swap-attention swap-modules optimize-recomp-communication-level "
        "optimize-recomp-communication-status split-transformers cpu-offloading-num-layers "
        "fine-grained-activation-offloading"
    ),
    "ZeRO shards the weights: use --zero-stage 3": (
        "DDP-impl use-torch-fsdp2 use-megatron-fsdp torch-fsdp2-* fsdp-* data-parallel-sharding-strategy "
        "suggested-communication-unit-size enable-full-sharding-in-hsdp keep-fp8-transpose-cache "
        "num-distributed-optimizer-instances memory-centric-tiled-linear tile-factor scattered-embeddings "
        "enable-zero3 layerzero layerzero-config"
    ),
    "the optimizer is offloaded as a whole: use --offload-optimizer cpu, and --no-offload-pin-memory if it is to "
    "be pageable": ("optimizer-offload-fraction no-pin-cpu-grads no-pin-cpu-params"),
    "the optimizer's state is fp32: use --grad-accum-dtype for the type of gradients": (
        "grad-reduce-in-bf16 ddp-reduce-scatter-with-fp32-accumulation use-precision-aware-optimizer "
        "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype"
    ),
    "not supported: --fp32-residual-connection keeps hidden states in fp32": (
        "embedding-weights-in-fp32 disable-bf16-reduced-precision-matmul"
    ),
    "fp8 and fp4 are not supported: use --bf16": (
        "fp8-* no-fp8-wgrad fp4-* first-last-layers-bf16 num-layers-at-start-in-bf16 "
        "num-layers-at-end-in-bf16 reuse-grad-buf-for-mxfp8-param-ag kitchen-*"
    ),
    "CUDA graphs are not supported: --compile compiles each layer": (
        "enable-cuda-graph external-cuda-graph cuda-graph-* te-rng-tracker"
    ),
    "tensor parallelism divides one dimension of each matrix: use --model-parallel-size": (
        "tp-2d tp-x tp-y use-nd-matmul nd1-dim1-size nd2-dim1-size"
    ),
    "weight gradients are not deferred: remove it": "defer-embedding-wgrad-compute wgrad-deferral-limit",
    "use --gradient-accumulation-fusion": "gemm-gradient-accumulation-fusion",
    "attention is fused unless another flag excludes it, such as --attention-softmax-in-fp32: remove it": (
        "attention-backend"
    ),
    "the attention mask follows from --pre-tokens and --reset-attention-mask: use them": (
        "sparse-mode attention-mask-type"
    ),
    "not supported: the process groups are created once, at the start": (
        "lazy-mpu-init use-tp-pp-dp-mapping pipeline-model-parallel-comm-backend"
    ),
    "all samples have --seq-length tokens: remove it": "variable-seq-lengths",
    "weights are the same on all data-parallel ranks: remove it": (
        "data-parallel-random-init check-weight-hash-across-dp-replicas-interval"
    ),
    # Optimizer, learning rate and training.
    "the update would depend on tensor parallelism: matrices are orthogonalized whole, without the flag": (
        "muon-tp-mode=blockwise muon-tp-mode=distributed"
    ),
    "Muon updates the matrices of the transformer layers, AdamW everything else: remove it": (
        "muon-scalar-optimizer muon-*"
    ),
    "Lion's betas are --adam-beta1 and --adam-beta2: use them": "lion-beta1 lion-beta2",
    "the groups of an optimizer are those of --weight-decay: remove it": "dump-param-to-param-group-map",
    "weight decay is constant: use --weight-decay": "start-weight-decay end-weight-decay weight-decay-incr-style",
    "durations are counted in iterations or samples, which are tokens / --seq-length: use --train-samples, "
    "--lr-decay-samples and --lr-warmup-samples": ("train-tokens lr-decay-tokens lr-warmup-tokens"),
    "the warm-up begins at 0: remove it": "lr-warmup-init",
    "all weights have one learning rate: use --lr and --min-lr": "decoupled-lr decoupled-min-lr",
    "weights are drawn from a normal distribution: use --init-method-std": "init-method-xavier-uniform",
    "not supported: remove it": (
        "random-ltd curriculum-learning-legacy data-efficiency-curriculum-learning iterations-to-skip "
        "train-sync-interval decrease-batch-size-if-needed deterministic-mode npu-deterministic use-deter-comp "
        "enable-experimental compression-training fim-* goldfish-* phase-transition-iterations batch-invariant-mode"
    ),
    # Data and tokenizers.
    "tokenizers are read from --tokenizer-model, or --vocab-file and --merge-file: use --tokenizer-type with them": (
        "tokenizer-metadata tokenizer-not-use-fast tiktoken-* "
        "tokenizer-hf-* tokenizer-special-tokens legacy-tokenizer trust-remote-code padded-vocab-size "
        "allow-ambiguous-pad-tokens"
    ),
    "data sets are named on the command line: use --data-path, or --train-data-path and its companions": (
        "data-args-path per-split-data-args-path aml-data-download-path train-idx-path train-desc-path "
        "train-doc-idx-path train-sample-idx-path train-shuffle-idx-path train-data-exact-num-epochs "
        "return-data-index use-dataset-only object-storage-cache-path disable-msc sample-rate"
    ),
    "samples are shuffled for each epoch: use --dataloader-type single": "dataloader-type",
    # Checkpoints, logs and tools.
    "settings are read from the command line: tools/inspect_checkpoint.py prints those of a checkpoint": (
        "use-checkpoint-args use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args"
    ),
    "the newest complete checkpoint of --load is loaded: remove it": "ckpt-step load-tag",
    "use --override-lr-scheduler": "no-load-lr-state",
    "checkpoints are converted by tools/convert_checkpoint.py": "ckpt-convert-* load-main-params-from-ckpt",
    "checkpoints are saved in one folder: use --save-interval, --keep-last and --keep-every": "save-retain-interval",
    "use --snapshot-interval, which keeps the state in memory, with a copy on the next host": (
        "non-persistent-* replication replication-*"
    ),
    "an evaluation takes --eval-iters batches, and tools/evaluate.py evaluates a checkpoint": (
        "full-validation multiple-validation-sets test-mode"
    ),
    "use --profile-steps A:B with --profile-dir": (
        "profile profile-step-start profile-step-end profile-ranks use-pytorch-profiler record-memory-history "
        "memory-snapshot-path profile-level profile-with-* profile-record-shapes profile-save-path"
    ),
    "runs are restarted by the launcher: use --auto-resume": (
        "inprocess-* enable-ft-package calc-ft-timeouts enable-high-availability "
        "enable-optimizer-state-local-copy enable-hbmfault-repair enable-worker-reboot "
        "run-workload-inspector-server error-injection-*"
    ),
    "not supported: send SIGTERM to save and end a run": "kill-switch-file",
    "not supported (a service of NVIDIA's own cluster): use --auto-resume": "adlr-autoresume adlr-autoresume-interval",
    "export to ONNX is not supported": "onnx-safe",
    "its sections are those of another program: --config reads a file with a line for each flag": "yaml-cfg",
    "it is for text generation: use tools/generate.py": (
        "temperature greedy top-p top-k out-seq-length sample-input-file sample-output-file num-samples "
        "genfile recompute ds-inference inference inference-* use-legacy-static-engine "
        "decode-only-cuda-graphs symmetric-ar-type nccl-all-reduce-for-prefill mlp-chunks-for-prefill "
        "disable-chunked-prefill"
    ),
    "it is for fine-tuning and evaluation tasks: use tasks/main.py": (
        "task epochs pretrained-checkpoint train-data valid-data overlapping-eval strict-lambada"
    ),
}


def _by_name(kind: str, names_by_text: Mapping[str, str]) -> dict[str, Outcome]:
    return {name: Outcome(kind, text) for text, names in names_by_text.items() for name in names.split()}


OUTCOMES: dict[str, Outcome] = {
    **_by_name("refused", _REFUSED),
    **_by_name("ignored", _IGNORED),
    **_by_name("fulfilled", _FULFILLED),
    **_by_name("replaced", _REPLACED),
}
"""Name of a flag without dashes, of one of its values (``name=value``) or of a family (``name-*``) to its outcome."""


def outcome_of(name: str, values: Sequence[str]) -> Outcome | None:
    """The outcome of the flag ``name``, without dashes, with ``values``; None if no classic suite has it."""
    for key in (f"{name}={' '.join(values)}", name):
        if key in OUTCOMES:
            return OUTCOMES[key]
    return next((outcome for key, outcome in OUTCOMES.items() if "*" in key and fnmatchcase(name, key)), None)
