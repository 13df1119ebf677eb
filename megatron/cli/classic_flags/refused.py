"""Flags of the classic suites that end a run before it starts."""

REFUSED = {
    "rotation by other rules than Llama's and YaRN's is not supported: remove it": (
        "rotary-* rope-* no-rope-freq mrope-section original-max-position-embeddings low-freq-factor high-freq-factor"
    ),
    "not a part of GPT-2, Llama, BERT or T5: remove it": (
        "quick-geglu glu-linear-offset activation-func-clamp-value qk-l2-norm add-dense-bias skip-bias-add "
        "squared-relu apply-layernorm-1p softmax-type embedding-init-method-std transformer-impl "
        "attention-output-gate linear-attention-* experimental-attention-variant dsa-*"
    ),
    "all layers have the attention window of --pre-tokens: use it": "window-attn-skip-freq sliding-window",
    "layers with experts are chosen by --moe-layer-freq: use it": "expert-interval",
    "tokens are dropped by --moe-expert-capacity-factor: use it": (
        "moe-train-capacity-factor moe-eval-capacity-factor"
    ),
    "not a part of the mixture of experts here: remove it": (
        "moe-* disable-moe-* mlp-type enable-expert-tensor-parallelism num-experts-switch use-tutel "
        "overlap-moe-expert-parallel-comm delay-wgrad-compute "
        "use-fused-weighted-squared-relu"
    ),
    "there is no multi-latent attention, multi-token prediction or state-space layer: remove it": (
        "multi-latent-attention multi-head-latent-attention q-lora-rank kv-lora-rank qk-* v-head-dim mscale "
        "mscale-all-dim cache-mla-latents mtp-* mamba-* hybrid-* is-hybrid-model disable-mamba-mem-eff-path "
        "heterogeneous-* spec"
    ),
    "BERT is trained with its sentence-order head: remove it": (
        "bert-no-binary-head output-bert-embeddings bert-embedder-type"
    ),
    "weight sharing between layers is not supported: remove it": "num-unique-layers param-sharing-style",
    "distillation is not supported: remove it": "mos kd kd-* *-teacher reset-iteration",
    "tools/preprocess_data.py formats conversations, by a chat template: remove it": "sft-*",
    "context parallelism is --context-parallel-size with --cp-comm-type p2p, all_gather, a2a or a2a+p2p: use it": (
        "context-parallel-* ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-* force-ds-sequence-parallel"
    ),
    "this pipeline schedule is not supported: choose one by --pipeline-schedule": "enable-zbh1-exact-semantics",
    "the layers of each stage are chosen by --pipeline-partition: use it": (
        "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout "
        "standalone-embedding-stage account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split"
    ),
    "all layers are recomputed, fully or selectively, or none: use --recompute-granularity full or selective, and "
    "--checkpoint-num-layers for layers that are recomputed together": (
        "recompute-method recompute-modules activations-checkpoint-method split-transformers cpu-offloading-num-layers "
        "fine-grained-activation-offloading"
    ),
    "ZeRO shards the weights: use --zero-stage 3": (
        "DDP-impl use-torch-fsdp2 use-megatron-fsdp torch-fsdp2-* fsdp-* data-parallel-sharding-strategy "
        "suggested-communication-unit-size enable-full-sharding-in-hsdp keep-fp8-transpose-cache "
        "num-distributed-optimizer-instances "
        "memory-centric-tiled-linear tile-factor scattered-embeddings"
    ),
    "the optimizer is offloaded completely: use --offload-optimizer cpu, and --no-offload-pin-memory if it is to "
    "be pageable": "optimizer-offload-fraction no-pin-cpu-grads no-pin-cpu-params",
    "the optimizer's state is fp32: use --grad-accum-dtype for the type of gradients": (
        "grad-reduce-in-bf16 ddp-reduce-scatter-with-fp32-accumulation use-precision-aware-optimizer "
        "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype"
    ),
    "not supported: --fp32-residual-connection keeps hidden states in fp32": (
        "embedding-weights-in-fp32 disable-bf16-reduced-precision-matmul"
    ),
    "fp8 and fp4 are not supported: use --bf16": (
        "fp8-* no-fp8-wgrad fp4-* first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 "
        "reuse-grad-buf-for-mxfp8-param-ag kitchen-*"
    ),
    "CUDA graphs are not supported: --compile compiles each layer": (
        "enable-cuda-graph external-cuda-graph cuda-graph-* te-rng-tracker"
    ),
    "weight gradients are not deferred: remove it": "defer-embedding-wgrad-compute wgrad-deferral-limit",
    "attention is fused unless another flag excludes it, such as --attention-softmax-in-fp32: remove it": (
        "attention-backend"
    ),
    "not supported: the process groups are created once, at the start": (
        "lazy-mpu-init use-tp-pp-dp-mapping pipeline-model-parallel-comm-backend"
    ),
    "all samples have --seq-length tokens: remove it": "variable-seq-lengths",
    "weights are the same on all data-parallel ranks: remove it": (
        "data-parallel-random-init check-weight-hash-across-dp-replicas-interval"
    ),
    "the update would depend on tensor parallelism: full matrices are orthogonalized without the flag": (
        "muon-tp-mode=blockwise muon-tp-mode=distributed"
    ),
    "Muon updates the matrices of the transformer layers, AdamW everything else: remove it": (
        "muon-scalar-optimizer muon-*"
    ),
    "Lion's betas are --adam-beta1 and --adam-beta2: use them": "lion-beta1 lion-beta2",
    "--weight-decay decides the groups of an optimizer: remove it": "dump-param-to-param-group-map",
    "weight decay is constant: use --weight-decay": "start-weight-decay end-weight-decay weight-decay-incr-style",
    "durations are counted in iterations or samples, which are tokens / --seq-length: use --train-samples, "
    "--lr-decay-samples and --lr-warmup-samples": "train-tokens lr-decay-tokens lr-warmup-tokens",
    "the warm-up begins at 0: remove it": "lr-warmup-init",
    "all weights have one learning rate: use --lr and --min-lr": "decoupled-lr decoupled-min-lr",
    "weights are drawn from a normal distribution: use --init-method-std": "init-method-xavier-uniform",
    "not supported: remove it": (
        "random-ltd curriculum-learning-legacy data-efficiency-curriculum-learning iterations-to-skip "
        "train-sync-interval decrease-batch-size-if-needed deterministic-mode enable-experimental "
        "compression-training fim-* goldfish-* phase-transition-iterations batch-invariant-mode"
    ),
    "tokenizers are read from --tokenizer-model, or --vocab-file and --merge-file: use --tokenizer-type with them": (
        "tokenizer-metadata tokenizer-not-use-fast tiktoken-* tokenizer-hf-* tokenizer-special-tokens "
        "legacy-tokenizer trust-remote-code padded-vocab-size allow-ambiguous-pad-tokens"
    ),
    "data sets are named on the command line: use --data-path, or --train-data-path and its companions": (
        "data-args-path per-split-data-args-path aml-data-download-path sample-rate "
        "train-idx-path train-desc-path train-doc-idx-path "
        "train-sample-idx-path train-shuffle-idx-path train-data-exact-num-epochs return-data-index "
        "use-dataset-only object-storage-cache-path disable-msc"
    ),
    "samples are shuffled for each epoch: use --dataloader-type single": "dataloader-type",
    "settings are read from the command line: tools/inspect_checkpoint.py prints the settings of a checkpoint": (
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
        "memory-snapshot-path"
    ),
    "runs are restarted by the launcher: use --auto-resume": (
        "inprocess-* enable-ft-package calc-ft-timeouts run-workload-inspector-server error-injection-*"
    ),
    "not supported: send SIGTERM to save and end a run": "kill-switch-file",
    "not supported (a service of NVIDIA's own cluster): use --auto-resume": (
        "adlr-autoresume adlr-autoresume-interval"
    ),
    "export to ONNX is not supported": "onnx-safe",
    "its sections belong to another program: --config reads a file with a line for each flag": "yaml-cfg",
    "it is for text generation: use tools/generate.py": (
        "temperature greedy top-p top-k out-seq-length sample-input-file sample-output-file num-samples genfile "
        "recompute ds-inference"
    ),
    "it is for fine-tuning and evaluation tasks: use tasks/main.py": (
        "task epochs pretrained-checkpoint train-data valid-data overlapping-eval strict-lambada"
    ),
}
"""Why a flag is refused, and what to use."""
