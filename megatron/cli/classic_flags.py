"""Tables of flags of Megatron-LM and Megatron-DeepSpeed that are not flags here: how each one is handled. No torch.

The classic suites are Megatron-LM (training GPT, BERT and T5), Megatron-DeepSpeed and DeepSpeed's 3D-parallelism
example (Megatron-LM v1.1.5). Most of their flags exist here, under the same name or as an alias in ``megatron/config``.
The tables contain the other flags, in four kinds: replaced by a flag of another name; fulfilled, because it is always
the case; ignored, with a warning; and refused. Each table maps a text, which the user reads, to the flags it applies
to. A name may end with ``*`` for a family of flags, or with ``=value`` for one value of a flag; the most specific name
wins. docs/classic-flags.md is generated from the tables.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

_REPLACED = {"--checkpoint-activations": "activations-checkpoint-method=uniform"}
"""Replacement to the classic flag that it replaces."""

_FULFILLED = {
    "Muon gathers full matrices over the tensor-parallel ranks": "muon-tp-mode=duplicated",
    "AdamW updates the parameters that Muon does not": "muon-scalar-optimizer=adam",
    "a signal always saves and ends the run": "exit-signal-handler",
    "layers are recomputed in groups of --checkpoint-num-layers, from the first layer on": "recompute-method=uniform",
    "samples are shuffled for each epoch, and epochs repeat until the end of training": "dataloader-type=single",
    "the loss is averaged over all tokens of the global batch": "calculate-per-token-loss",
    "throughput is always logged": "log-throughput",
    "TensorBoard also gets the times of --timing-log-level": "log-timers-to-tensorboard",
    "data sets are read by memory map": "data-impl=mmap data-impl=infer",
    "tokens do not attend to later ones": "next-tokens=0 next-tockens=0 next=0",
    "offloaded state is page-locked by default": "use-pin-memory",
    "memory is never emptied": "empty-unused-memory-level=0",
    "processes of mpirun are recognized": "deepspeed-mpi",
    "this is the default of both models": (
        "softmax-type=vanilla transformer-impl=local weight-decay-incr-style=constant"
    ),
    "tokens are always exchanged while the shared expert is computed": "moe-shared-expert-overlap",
    "the weights of experts are a softmax of the router's logits": "moe-router-score-function=softmax",
    "tokens with the smallest weights are dropped": "moe-token-drop-policy=probs",
    "no token is dropped without --moe-expert-capacity-factor": "disable-moe-token-dropping",
    "experts have their own parameter group with expert parallelism": "create-moe-param-group",
}
"""What is always the case, to the flags that ask for it."""

_IGNORED = {
    "attention is torch's fused kernel (FlashAttention on CUDA) unless another flag excludes it": (
        "use-flash-attn* attention-backend=flash attention-backend=fused attention-backend=auto *masked-softmax-fusion"
    ),
    "no token of a causal model attends to later tokens": "next-tokens next-tockens next",
    "the mask follows from --pre-tokens and --reset-attention-mask": "no-create-attention-mask-in-dataloader",
    "kernels are chosen by --fused-kernels, --bias-gelu-fusion, --bias-dropout-fusion and --compile": (
        "transformer-impl=transformer_engine use-mcore-models use-legacy-models no-persist-layer-norm "
        "no-bias-swiglu-fusion no-rope-fusion disable-mem-efficient-ln use-te-activation-func "
        "cross-entropy-loss-fusion cross-entropy-fusion-impl no-clone-scatter-output-in-embedding "
        "torch-adam ds-fused-adam moe-permute-fusion moe-router-fusion"
    ),
    "Muon's iterations are in bf16 with --bf16, otherwise in fp32": "muon-fp32-matmul-prec",
    "DeepSpeed reduces gradients, in buckets of --zero-reduce-bucket-size": (
        "DDP-impl=local DDP-impl=torch *contiguous-buffers-in-* ddp-* no-gradient-reduce-div-fusion no-align-* "
        "*delay-grad-reduce *delay-param-gather"
    ),
    "--zero-overlap-comm overlaps communication with computation": (
        "overlap-param-gather-with-optimizer-step overlap-cpu-optimizer-d2h-h2d"
    ),
    "each rank sends its complete hidden states to the next stage, and computes meanwhile": (
        "no-scatter-gather-tensors-in-pipeline *overlap-p2p-communication* use-ring-exchange-p2p "
        "microbatch-group-size-per-virtual-pipeline-stage"
    ),
    "tensor-parallel communication overlaps with the matmuls of the backward pass where it can": (
        "no-async-tensor-model-parallel-allreduce tp-comm-bulk-* tp-comm-split-* tp-comm-overlap-* "
        "tp-comm-bootstrap-backend disable-tp-comm-*"
    ),
    "the parallel layout decides the process groups and backends": (
        "enable-gloo-process-groups disable-gloo-process-groups high-priority-stream-groups "
        "nccl-communicator-config-path use-nccl-ub use-sharp sharp-enabled-group disable-symmetric-registration "
        "distributed-timeout-seconds-after-init"
    ),
    "the allocator keeps freed memory; against fragmentation PYTORCH_ALLOC_CONF=expandable_segments:True is set": (
        "empty-unused-memory-level"
    ),
    "samples are shuffled for each epoch, and epochs repeat until the end of training (data sets of pretrain() "
    "are not shuffled)": "dataloader-type=cyclic repeated-dataloader",
    "data sets are memory-mapped, and as many processes as are of use build their index maps": (
        "no-mmap-bin-files num-dataset-builder-threads mid-level-dataset-surplus dataloader-fast-cache-load "
        "dataloader-defer-npy-index-mmap data-impl mmap-warmup"
    ),
    "experts are split over as many ranks as the other layers": "expert-tensor-parallel-size",
    "Python decides when garbage is collected": "manual-gc manual-gc-interval no-manual-gc-eval",
    "TensorBoard gets every metric of every logged iteration: see --log-interval": (
        "tensorboard-log-interval tensorboard-queue-size *log-*-to-tensorboard"
    ),
    "metrics are written to --metrics-file and --tensorboard-dir, and the configuration to --run-dir": (
        "wandb-save-dir wandb-entity log-energy log-progress logging-level config-logger-dir"
    ),
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
        "ckpt-format use-dist-ckpt dist-ckpt-* auto-detect-ckpt-format *ckpt-fully-parallel-* universal-checkpoint "
        "ckpt-assume-constant-structure use-persistent-ckpt-worker distrib-optim-fully-reshardable-mem-efficient "
        "no-strict-fsdp-dtensor-load checkpoint-io-buffer-size checkpoint-data-parallel checkpoint-writer-decoupled "
        "aio-intra-op-parallelism"
    ),
    "a --load folder without a checkpoint ends the run, unless it is the --save folder": "exit-on-missing-checkpoint",
    "weights are initialized before a checkpoint is loaded": "no-initialization init-model-with-meta-device",
    "it is a service of NVIDIA's own cluster": "*one-logger* app-tag-*",
}
"""What happens instead of what a flag asks for, printed as a warning, to the flags."""

_REFUSED = {
    "only Llama's and YaRN's scaling of RoPE are supported: remove it": (
        "rotary-* rope-* no-rope-freq mrope-section original-max-position-embeddings low-freq-factor high-freq-factor"
    ),
    "not a part of GPT-2, Llama, BERT or T5: remove it": (
        "quick-geglu glu-linear-offset activation-func-clamp-value qk-l2-norm add-dense-bias skip-bias-add "
        "squared-relu apply-layernorm-1p softmax-type embedding-init-method-std transformer-impl "
        "attention-output-gate linear-attention-* experimental-attention-variant dsa-*"
    ),
    "all layers have the attention window of --pre-tokens: use it": "window-attn-skip-freq sliding-window",
    "layers with experts are chosen by --moe-layer-freq: use it": "expert-interval",
    "tokens are dropped by --moe-expert-capacity-factor: use it": "moe-train-capacity-factor moe-eval-capacity-factor",
    "not a part of the mixture of experts here: remove it": (
        "moe-* disable-moe-* mlp-type enable-expert-tensor-parallelism num-experts-switch use-tutel "
        "overlap-moe-expert-parallel-comm delay-wgrad-compute use-fused-weighted-squared-relu"
    ),
    "tools/preprocess_data.py formats conversations, by a chat template: remove it": "sft-*",
    "context parallelism is --context-parallel-size with --cp-comm-type p2p, all_gather, a2a or a2a+p2p: use it": (
        "context-parallel-* ds-sequence-parallel-fpdt* force-ds-sequence-parallel"
    ),
    "this pipeline schedule is not supported: choose one by --pipeline-schedule": "enable-zbh1-exact-semantics",
    "the layers of each stage are chosen by --pipeline-partition: use it": (
        "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout "
        "standalone-embedding-stage account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split"
    ),
    "all layers are recomputed, fully or in part, or none: use --recompute-granularity, --recompute-mlp-activation, "
    "and --checkpoint-num-layers for layers that are recomputed together": (
        "recompute-method recompute-modules activations-checkpoint-method split-transformers "
        "cpu-offloading-num-layers fine-grained-activation-offloading"
    ),
    "ZeRO shards the weights: use --zero-stage 3": (
        "DDP-impl use-torch-fsdp2 use-megatron-fsdp use-custom-fsdp torch-fsdp2-* fsdp-* "
        "data-parallel-sharding-strategy suggested-communication-unit-size enable-full-sharding-in-hsdp "
        "keep-fp8-transpose-cache* num-distributed-optimizer-instances memory-centric-tiled-linear tile-factor "
        "scattered-embeddings"
    ),
    "the optimizer is offloaded completely: use --offload-optimizer cpu, and --no-offload-pin-memory for pageable "
    "memory": "optimizer-offload-fraction no-pin-cpu-grads no-pin-cpu-params",
    "the optimizer's state is fp32: use --grad-accum-dtype for the type of gradients": (
        "grad-reduce-in-bf16 ddp-reduce-scatter-with-fp32-accumulation use-precision-aware-optimizer main-grads-dtype "
        "main-params-dtype exp-avg-dtype exp-avg-sq-dtype"
    ),
    "not supported: --fp32-residual-connection keeps hidden states in fp32": (
        "embedding-weights-in-fp32 disable-bf16-reduced-precision-matmul"
    ),
    "FP8 is --fp8-format with --fp8-recipe tensorwise or rowwise, and has no other settings: remove it": (
        "fp8-* no-fp8-wgrad fp4-* first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 "
        "reuse-grad-buf-for-mxfp8-param-ag kitchen-*"
    ),
    "CUDA graphs are not supported: --compile compiles each layer": ("*cuda-graph* te-rng-tracker"),
    "attention is fused unless another flag excludes it, such as --attention-softmax-in-fp32: remove it": (
        "attention-backend"
    ),
    "the update would depend on tensor parallelism: full matrices are orthogonalized without the flag": (
        "muon-tp-mode=blockwise muon-tp-mode=distributed"
    ),
    "Muon updates the matrices of the transformer layers, AdamW everything else: remove it": (
        "muon-scalar-optimizer muon-*"
    ),
    "Lion's betas are --adam-beta1 and --adam-beta2: use them": "lion-beta1 lion-beta2",
    "weight decay is constant: use --weight-decay": "start-weight-decay end-weight-decay weight-decay-incr-style",
    "durations are counted in iterations or samples, which are tokens / --seq-length: use --train-samples, "
    "--lr-decay-samples and --lr-warmup-samples": "train-tokens lr-decay-tokens lr-warmup-tokens",
    "embedding and output layer have the learning rate of the others: use --lr and --min-lr": (
        "decoupled-lr decoupled-min-lr"
    ),
    "weights are drawn from a normal distribution: use --init-method-std": "init-method-xavier-uniform",
    "weight sharing between layers is not supported: remove it": "num-unique-layers param-sharing-style",
    "BERT is trained with its sentence-order head: remove it": (
        "bert-no-binary-head output-bert-embeddings bert-embedder-type"
    ),
    "not supported: remove it": (
        "random-ltd curriculum-learning-legacy data-efficiency-curriculum-learning iterations-to-skip "
        "train-sync-interval decrease-batch-size-if-needed deterministic-mode enable-experimental "
        "compression-training fim-* goldfish-* phase-transition-iterations batch-invariant-mode "
        "mos kd kd-* *-teacher reset-iteration defer-embedding-wgrad-compute wgrad-deferral-limit "
        "lazy-mpu-init use-tp-pp-dp-mapping pipeline-model-parallel-comm-backend variable-seq-lengths "
        "data-parallel-random-init check-weight-hash-across-dp-replicas-interval onnx-safe "
        "dump-param-to-param-group-map lr-warmup-init "
        "multi-latent-attention multi-head-latent-attention q-lora-rank kv-lora-rank qk-* v-head-dim mscale "
        "mscale-all-dim cache-mla-latents mtp-* mamba-* hybrid-* is-hybrid-model disable-mamba-mem-eff-path "
        "heterogeneous-* spec img-dim"
    ),
    "tokenizers are read from --tokenizer-model, or --vocab-file and --merge-file: use --tokenizer-type with them": (
        "tokenizer-metadata tokenizer-not-use-fast tiktoken-* tokenizer-hf-* tokenizer-special-tokens "
        "legacy-tokenizer trust-remote-code padded-vocab-size allow-ambiguous-pad-tokens"
    ),
    "data sets are named on the command line: use --data-path, or --train-data-path and its companions": (
        "*data-args-path aml-data-download-path sample-rate "
        "train-idx-path train-desc-path train-doc-idx-path train-sample-idx-path train-shuffle-idx-path "
        "train-data-exact-num-epochs return-data-index use-dataset-only object-storage-cache-path s3-cache-path "
        "disable-msc"
    ),
    "the weights of a blend always count as shares of its samples: remove it": "renormalize-blend-weights",
    "encoder and decoder have one layout: use --model-parallel-size and --pipe-parallel-size": (
        "encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size"
    ),
    "samples are shuffled for each epoch: use --dataloader-type single": "dataloader-type",
    "settings are read from the command line: tools/inspect_checkpoint.py prints the settings of a checkpoint": (
        "use-checkpoint-args use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args"
    ),
    "the checkpoint that the file latest in --load names is loaded: remove it": "ckpt-step load-tag",
    "use --override-lr-scheduler": "no-load-lr-state",
    "checkpoints of other programs are converted by tools/convert_checkpoint.py": (
        "ckpt-convert-* load-main-params-from-ckpt load-model-opt-format"
    ),
    "checkpoints are saved in one folder: use --save-interval, --keep-last and --keep-every": "save-retain-interval",
    "use --snapshot-interval, which keeps the state in memory, with a copy on the next host": (
        "non-persistent-* replication*"
    ),
    "an evaluation takes --eval-iters batches, and tools/evaluate.py evaluates a checkpoint": (
        "full-validation multiple-validation-sets test-mode"
    ),
    "use --profile-steps A:B with --profile-dir": (
        "profile profile-step-* profile-ranks use-pytorch-profiler record-memory-history memory-snapshot-path"
    ),
    "runs are restarted by the launcher: use --auto-resume": (
        "inprocess-* enable-ft-package calc-ft-timeouts run-workload-inspector-server error-injection-*"
    ),
    "not supported: send SIGTERM to save and end a run": "kill-switch-file",
    "not supported (a service of NVIDIA's own cluster): use --auto-resume": "adlr-autoresume adlr-autoresume-interval",
    "its sections belong to another program: --config reads a file with a line for each flag": "yaml-cfg",
    "it is for text generation: use tools/generate.py": (
        "temperature greedy top-p top-k out-seq-length sample-input-file sample-output-file num-samples genfile "
        "recompute ds-inference"
    ),
    "it is for fine-tuning and evaluation tasks: use tasks/main.py": (
        "task pretrained-checkpoint train-data valid-data overlapping-eval strict-lambada"
    ),
}
"""Why flags are refused and what to use instead, to the flags."""


class Outcome(NamedTuple):
    """How a classic flag is handled."""

    kind: str
    """``replaced``, ``fulfilled``, ``ignored`` or ``refused``."""
    text: str
    """The replacement flag; what is always the case, or happens instead; why it is refused, and what to use."""


def _by_name(kind: str, names_by_text: Mapping[str, str]) -> dict[str, Outcome]:
    return {name: Outcome(kind, text) for text, names in names_by_text.items() for name in names.split()}


OUTCOMES: dict[str, Outcome] = {
    **_by_name("refused", _REFUSED),
    **_by_name("ignored", _IGNORED),
    **_by_name("fulfilled", _FULFILLED),
    **_by_name("replaced", _REPLACED),
}
"""Flag without dashes, flag with a value (``name=value``) or family of flags (``name-*``) to its outcome."""


def outcome_of(name: str, values: Sequence[str]) -> Outcome | None:
    """The outcome of the flag ``name``, without dashes, with ``values``; None if no classic suite has it."""
    for key in (f"{name}={' '.join(values)}", name):
        if key in OUTCOMES:
            return OUTCOMES[key]
    return next((outcome for key, outcome in OUTCOMES.items() if "*" in key and fnmatchcase(name, key)), None)
