"""Command lines that break a rule of megatron/cli/validation/memory.py."""

BROKEN = [
    (
        "partitioned activations exclude --sequence-parallel",
        "--sequence-parallel --model-parallel-size 2 --checkpoint-activations --partition-activations",
        "--partition-activations cannot be combined with --sequence-parallel",
        None,
    ),
    (
        "the pipeline runs at ZeRO 0 or 1",
        "--pipe-parallel-size 1 --zero-stage 2",
        "--zero-stage 2 cannot be combined with --pipe-parallel-size 1: the pipeline accumulates gradients over "
        "micro-batches",
        "--zero-stage 1",
    ),
    ("fp16 needs a GPU", "--fp16", "--fp16 does not work on the CPU: use --bf16", None),
    (
        "frozen weights beside adapters are not on NVMe",
        "--lora-rank 4 --zero-stage 3 --nvme-path . --offload-param nvme",
        "--lora-rank does not work with --offload-param nvme: use --offload-param cpu",
        "--offload-optimizer nvme --offload-param cpu",
    ),
    ("--fp16 excludes --bf16", "gpu --fp16 --bf16", "--fp16 and --bf16 exclude each other", None),
    (
        "the initial loss scale is a power of two",
        "--initial-loss-scale 1000",
        "--initial-loss-scale 1000 is not a power of two: use 1024",
        "--initial-loss-scale 1024",
    ),
    ("the smallest loss scale is a whole number", "--min-scale 1.5", "--min-scale 1.5 is not a whole", "--min-scale 2"),
    (
        "a half-precision loss needs half precision",
        "--fp16-lm-cross-entropy",
        "--fp16-lm-cross-entropy has no effect in fp32",
        "--bf16",
    ),
    (
        "an fp32 residual connection needs half precision",
        "--fp32-residual-connection",
        "--fp32-residual-connection has no effect in fp32",
        "--bf16",
    ),
    *(
        ("an offloaded optimizer needs ZeRO", flag, "--offload-optimizer cpu needs ZeRO", "--zero-stage 1")
        for flag in ("--offload-optimizer cpu", "--cpu-optimizer")
    ),
    *(
        (
            "an optimizer on NVMe needs ZeRO 3",
            f"--offload-optimizer nvme --nvme-path d --zero-stage {stage}",
            "--offload-optimizer nvme works at ZeRO 3 only: use --zero-stage 3, or --offload-optimizer cpu",
            "--zero-stage 3",
        )
        for stage in (0, 1, 2)
    ),
    *(
        (
            "offloaded weights need ZeRO 3",
            f"--offload-param cpu --zero-stage {stage}",
            "--offload-param cpu works at ZeRO 3 only: use --zero-stage 3, or remove it",
            "--zero-stage 3",
        )
        for stage in (0, 1, 2)
    ),
    *(
        (
            "offload to NVMe needs a folder",
            f"{flag} nvme --zero-stage 3",
            "offload to nvme needs a folder on that device: add --nvme-path",
            "--nvme-path d",
        )
        for flag in ("--offload-optimizer", "--offload-param")
    ),
    (
        "offload to NVMe needs a folder",
        "--nvme-path d --zero-stage 3",
        "--nvme-path has no effect without --offload-optimizer nvme or --offload-param nvme",
        "--offload-param nvme",
    ),
    (
        "--cpu-torch-adam needs --offload-optimizer",
        "--cpu_torch_adam --zero-stage 1",
        "--cpu-torch-adam has no effect without --offload-optimizer",
        "--cpu-optimizer",
    ),
    (
        "--no-offload-pin-memory needs offload",
        "--no-offload-pin-memory --zero-stage 3",
        "--no-offload-pin-memory has no effect without --offload-optimizer or --offload-param",
        "--offload-param cpu",
    ),
    (
        "overlapped reduction needs ZeRO on the plain engine",
        "--zero-overlap-comm",
        "--zero-overlap-comm has no effect without ZeRO: add --zero-stage 1",
        "--zero-stage 1",
    ),
    (
        "overlapped reduction needs ZeRO on the plain engine",
        "--zero-overlap-comm --zero-stage 1 --pipe-parallel-size 1",
        "--zero-overlap-comm does not work in a pipeline",
        "--pipe-parallel-size 0",
    ),
    *(
        (
            "round-robin gradients need ZeRO 1 or 2",
            f"--zero-round-robin-gradients --zero-stage {stage}",
            f"--zero-round-robin-gradients has no effect at --zero-stage {stage}: use --zero-stage 1 or 2",
            "--zero-stage 2",
        )
        for stage in (0, 3)
    ),
    *(
        (
            "coalesced reduction needs ZeRO 2 or 3",
            f"--zero-coalesce-grad-reduction --zero-stage {stage}",
            f"--zero-coalesce-grad-reduction has no effect at --zero-stage {stage}, which reduces gradients once",
            "--zero-stage 2",
        )
        for stage in (0, 1)
    ),
    (
        "coalesced reduction accumulates in the type of the weights",
        "--zero-coalesce-grad-reduction --zero-stage 3 --bf16 --grad-accum-dtype fp32",
        "--zero-coalesce-grad-reduction cannot be combined with --grad-accum-dtype fp32: remove one",
        "--grad-accum-dtype bf16",
    ),
    (
        "coalesced reduction at ZeRO 2 excludes overlapped reduction",
        "--zero-coalesce-grad-reduction --zero-stage 2 --zero-overlap-comm",
        "--zero-coalesce-grad-reduction at --zero-stage 2 leaves nothing to overlap: remove it",
        "--zero-stage 3",
    ),
    (
        "gradients accumulate in fp32 or in the weights' type",
        "--grad-accum-dtype bf16",
        "--grad-accum-dtype bf16 is for half precision, and weights are fp32: add --bf16",
        "--bf16",
    ),
    (
        "gradients accumulate in fp32 or in the weights' type",
        "gpu --grad-accum-dtype bf16 --fp16",
        "--grad-accum-dtype bf16 cannot be combined with --fp16: use --grad-accum-dtype fp32",
        "--grad-accum-dtype fp32",
    ),
    *(
        (
            "selective recomputation is neither partitioned nor grouped",
            f"{flag} --recompute-granularity selective",
            f"{flag} cannot be combined with --recompute-granularity selective: use full",
            "--recompute-granularity full",
        )
        for flag in ("--partition-activations", "--checkpoint-num-layers 2")
    ),
    *(
        (
            "activations in one buffer, or in CPU memory, are partitioned",
            f"{flag} --checkpoint-activations",
            f"{flag} cannot work without --partition-activations",
            "--partition-activations",
        )
        for flag in ("--contiguous-checkpointing", "--checkpoint-in-cpu")
    ),
]
WARNED = [
    ("--loss-scale needs --fp16", "gpu --loss-scale 8", "--loss-scale has no effect without --fp16", "--fp16"),
    (
        "fp32 accumulation needs half precision",
        "--accumulate-allreduce-grads-in-fp32",
        "--grad-accum-dtype fp32 has no effect in fp32: add --bf16",
        "--bf16",
    ),
    *(
        (
            f"{flag.split()[0]} needs --checkpoint-activations",
            flag,
            f"{flag.split()[0]} has no effect without --checkpoint-activations",
            f"--checkpoint-activations {company}",
        )
        for flag, company in [
            ("--partition-activations", ""),
            ("--contiguous-checkpointing", "--partition-activations"),
            ("--checkpoint-in-cpu", "--partition-activations"),
            ("--synchronize-each-layer", ""),
            ("--profile-backward", ""),
            ("--checkpoint-num-layers 2", ""),
        ]
    ),
]
