"""Flags of the classic suites that are accepted: replaced by another, fulfilled in any case, or ignored."""

REPLACED = {
    "--checkpoint-activations": "activations-checkpoint-method=uniform",
    "--normalization LayerNorm": "normalization=layernorm",
    "--normalization RMSNorm": "normalization=rmsnorm",
}
"""The flag that a flag is read as."""

FULFILLED = {
    "Muon gathers full matrices over the tensor-parallel ranks": "muon-tp-mode=duplicated",
    "the parameters that Muon does not update are AdamW's": "muon-scalar-optimizer=adam",
    "a signal always saves and ends the run": "exit-signal-handler",
    "the layers that are recomputed together are counted from the first one on": "recompute-method=uniform",
    "samples are shuffled for each epoch, and epochs repeat until the end of training": "dataloader-type=single",
    "the loss is averaged over all tokens of the global batch": "calculate-per-token-loss",
    "throughput is always logged": "log-throughput",
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
    "experts have their own parameter group with expert parallelism": "create-moe-param-group",
    "this is the size without this kind of parallelism or layer": "vocab-extra-ids=0",
}
"""What happens in any case, as a flag asks for it."""

IGNORED = {
    "attention is torch's fused kernel (FlashAttention on CUDA) unless another flag excludes it; "
    "--scaled-upper-triang-masked-softmax-fusion requires it": (
        "use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder "
        "attention-backend=flash attention-backend=fused attention-backend=auto scaled-masked-softmax-fusion "
        "no-masked-softmax-fusion"
    ),
    "the attention mask follows from --pre-tokens and --reset-attention-mask": (
        "no-create-attention-mask-in-dataloader"
    ),
    "kernels are chosen by --fused-kernels, --bias-gelu-fusion, --bias-dropout-fusion and --compile": (
        "transformer-impl=transformer_engine use-mcore-models use-legacy-models no-persist-layer-norm "
        "no-bias-swiglu-fusion no-rope-fusion disable-mem-efficient-ln use-te-activation-func "
        "cross-entropy-loss-fusion cross-entropy-fusion-impl no-clone-scatter-output-in-embedding"
    ),
    "AdamW is torch's or apex's by --fused-kernels": "torch-adam ds-fused-adam",
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
        "microbatch-group-size-per-virtual-pipeline-stage"
    ),
    "tensor-parallel communication always overlaps with the matmuls of the backward pass": (
        "no-async-tensor-model-parallel-allreduce tp-comm-* disable-tp-comm-*"
    ),
    "the parallel layout decides the process groups and backends": (
        "enable-gloo-process-groups disable-gloo-process-groups high-priority-stream-groups "
        "nccl-communicator-config-path use-nccl-ub use-sharp sharp-enabled-group disable-symmetric-registration "
        "distributed-timeout-seconds-after-init"
    ),
    "the allocator keeps freed memory; against fragmentation set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True": (
        "empty-unused-memory-level"
    ),
    "samples are shuffled for each epoch, and epochs repeat until the end of training (data sets of pretrain() "
    "are not shuffled)": "dataloader-type=cyclic repeated-dataloader",
    "data sets are memory-mapped, and built by one thread": (
        "no-mmap-bin-files num-dataset-builder-threads mid-level-dataset-surplus dataloader-fast-cache-load "
        "dataloader-defer-npy-index-mmap"
    ),
    "Python decides when garbage is collected": "manual-gc manual-gc-interval no-manual-gc-eval",
    "TensorBoard gets every metric of every logged iteration: see --log-interval": (
        "tensorboard-log-interval tensorboard-queue-size log-batch-size-to-tensorboard "
        "no-log-learnig-rate-to-tensorboard no-log-learning-rate-to-tensorboard no-log-loss-scale-to-tensorboard "
        "log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard"
    ),
    "--metrics-file and --run-dir have the progress and the configuration of a run": (
        "log-progress logging-level config-logger-dir"
    ),
    "metrics are written to --metrics-file and --tensorboard-dir": "wandb-* log-energy",
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
        "no-strict-fsdp-dtensor-load checkpoint-io-buffer-size checkpoint-data-parallel checkpoint-writer-decoupled "
        "aio-intra-op-parallelism"
    ),
    "a --load folder without a checkpoint ends the run, unless it is the --save folder": "exit-on-missing-checkpoint",
    "weights are initialized before a checkpoint is loaded": "no-initialization init-model-with-meta-device",
    "it is a service of NVIDIA's own cluster": "no-one-logger one-logger-* app-tag-*",
}
"""What happens instead of what a flag asks for; a warning says so."""
