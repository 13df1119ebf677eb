"""Command lines that break a rule of megatron/cli/validation/model.py."""

from importlib.util import find_spec

_YARN = "yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
BROKEN = [
    ("SwiGLU excludes GELU", "--swiglu --openai-gelu", "--swiglu and --openai-gelu exclude each other: remove", None),
    (
        "grouped-query attention has a number of groups",
        "--group-query-attention",
        "--group-query-attention needs --num-query-groups: give the number of key and value heads",
        "--num-query-groups 2",
    ),
    (
        "rotation needs rotary position embeddings",
        "--rotary-base 500000",
        "--rotary-base 500000 has no effect without --position-embedding-type rope",
        "--position-embedding-type rope",
    ),
    (
        "--tiled-mlp-num-shards needs --tiled-mlp",
        "--tiled-mlp-num-shards 4",
        "--tiled-mlp-num-shards has no effect without --tiled-mlp: add --tiled-mlp, or remove",
        "--tiled-mlp",
    ),
    ("--tiled-mlp excludes --compile", "--tiled-mlp --compile", "--tiled-mlp and --compile exclude each other", None),
    (
        "--tiled-mlp excludes the dropout of adapters",
        "--tiled-mlp --lora-rank 2 --lora-dropout 0.1",
        "--tiled-mlp and --lora-dropout 0.1 exclude each other: remove one",
        "--lora-target dense",
    ),
    (
        "FlexAttention runs on GPUs without dropout",
        "--flex-attention",
        "--flex-attention needs GPUs, and this run is on cpu: remove it",
        None,
    ),
    *(
        ("YaRN has a factor and an original length", f"--position-embedding-type {words}", message, remedy)
        for words, message, remedy in (
            (
                "yarn --yarn-rotary-scaling-factor 4",
                "--position-embedding-type yarn needs --yarn-original-max-position-embeddings: add it",
                "--yarn-original-max-position-embeddings 16",
            ),
            (
                "rope --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16",
                "--yarn-rotary-scaling-factor and --yarn-original-max-position-embeddings has no effect without",
                "--position-embedding-type yarn",
            ),
            (
                f"{_YARN} --yarn-beta-fast 1",
                "--yarn-beta-fast 1 is no more than --yarn-beta-slow 1",
                "--yarn-beta-fast 2",
            ),
            (f"{_YARN} --rotary-base 1", "--position-embedding-type yarn needs waves that become", "--rotary-base 2"),
        )
    ),
    *(
        (
            "one rule extends the rotation",
            f"--position-embedding-type {words}",
            f"{rivals} exclude each other: keep one",
            None,
        )
        for words, rivals in (
            (f"{_YARN} --use-rope-scaling", "--position-embedding-type yarn and --use-rope-scaling"),
            (
                "rope --use-rope-scaling --rotary-seq-len-interpolation-factor 2",
                "--use-rope-scaling and --rotary-seq-len-interpolation-factor",
            ),
        )
    ),
    (
        "rotation turns pairs of dimensions",
        "--position-embedding-type rope --rotary-percent 0.2",
        "--rotary-percent 0.2 of heads of 16 rotates 3 dimensions, which is no even number",
        "--rotary-percent 0.25",
    ),
    (
        "--rope-scaling-factor needs --use-rope-scaling",
        "--rope-scaling-factor 4",
        "--rope-scaling-factor has no effect without --use-rope-scaling",
        "--use-rope-scaling --position-embedding-type rope",
    ),
    *(
        (
            f"{flag.split()[0]} needs --lora-rank",
            flag,
            f"{flag.split()[0]} has no effect without --lora-rank",
            "--lora-rank 4",
        )
        for flag in ("--lora-alpha 8", "--lora-dropout 0.1", "--lora-target dense")
    ),
    (
        "adapters belong to whole linear layers",
        "--lora-rank 4 --lora-target q_proj",
        "--lora-target q_proj needs all of q_proj k_proj v_proj",
        "--lora-target q_proj k_proj v_proj",
    ),
    (
        "adapters belong to whole linear layers",
        "--lora-rank 4 --lora-target embedding",
        "--lora-target embedding is unknown: choose from query_key_value dense dense_h_to_4h dense_4h_to_h",
        "--lora-target dense",
    ),
    (
        "adapters exclude Muon",
        "--lora-rank 4 --optimizer muon",
        "--lora-rank does not work with --optimizer muon: use --optimizer adam",
        "--optimizer adam",
    ),
    (
        "--fused-kernels apex needs apex",
        "--fused-kernels apex",
        "--fused-kernels apex needs CUDA",
        "--fused-kernels auto",
    ),
    *(
        (
            "the fused causal attention kernel is possible",
            f"--scaled-upper-triang-masked-softmax-fusion {flag}",
            f"--scaled-upper-triang-masked-softmax-fusion cannot be combined with {flag}",
            None,
        )
        for flag in (
            "--attention-softmax-in-fp32",
            "--apply-query-key-layer-scaling",
            "--reset-attention-mask",
            "--pre-tokens 30",
        )
    ),
    (
        "--compile excludes ZeRO 3",
        "--compile --zero-stage 3",
        "--compile does not work at --zero-stage 3: use --zero-stage 2",
        "--zero-stage 2",
    ),
    *(
        (
            "gradient accumulation fusion needs gradients that stay in place",
            f"--gradient-accumulation-fusion --gas 2 {broken}",
            "--gradient-accumulation-fusion has no effect if DeepSpeed moves gradients after each micro-batch: "
            f"use {instead}, or remove it",
            corrected,
        )
        for broken, instead, corrected in (
            ("--zero-stage 2", "--zero-stage 1", "--zero-stage 1"),
            ("--zero-stage 1 --zero-overlap-comm", "no --zero-overlap-comm", None),
            ("--zero-stage 1 --offload-optimizer cpu", "no --offload-optimizer", "--offload-optimizer none"),
            ("--zero-stage 1 --bf16 --grad-accum-dtype fp32", "no --grad-accum-dtype fp32", "--grad-accum-dtype bf16"),
        )
    ),
    (
        "gradient accumulation fusion needs gradients that stay in place",
        "--gradient-accumulation-fusion",
        "--gradient-accumulation-fusion has no effect with one micro-batch a step: raise --gas",
        "--gas 2",
    ),
    (
        "--gradient-accumulation-fusion excludes --compile",
        "--gradient-accumulation-fusion --compile --gas 2",
        "--gradient-accumulation-fusion and --compile exclude each other",
        None,
    ),
]
if find_spec("apex") is None:
    BROKEN.append(
        (
            "--fused-kernels apex needs apex",
            "gpu --fused-kernels apex",
            "--fused-kernels apex: apex is not installed",
            "--fused-kernels torch",
        )
    )
