"""Command lines that break a rule of megatron/cli/validation/experts.py."""

BROKEN = [
    *(
        (
            f"{flag.split()[0]} needs --num-experts",
            flag,
            f"{flag.split()[0]} has no effect without --num-experts",
            "--num-experts 8",
        )
        for flag in (
            "--moe-layer-freq 2",
            "--moe-ffn-hidden-size 32",
            "--moe-router-topk 3",
            "--moe-router-pre-softmax",
            "--moe-router-load-balancing-type none",
            "--moe-aux-loss-coeff 0.1",
            "--moe-z-loss-coeff 0.1",
            "--moe-router-dtype fp64",
            "--moe-expert-capacity-factor 1",
            "--moe-shared-expert-intermediate-size 32",
            "--moe-grouped-gemm",
            "--moe-per-layer-logging",
            "--expert-model-parallel-size 2",
        )
    ),
    (
        "the router chooses from the experts",
        "--num-experts 4 --moe-router-topk 5",
        "--moe-router-topk 5 is more than --num-experts 4: lower it",
        "--moe-router-topk 4",
    ),
    (
        "--moe-z-loss-coeff needs --num-experts",
        "--num-experts 1 --moe-z-loss-coeff 0.1",
        "--moe-z-loss-coeff has no effect without --num-experts",
        "--num-experts 8",
    ),
    (
        "a router that chooses one expert has a gradient",
        "--num-experts 4 --moe-router-topk 1",
        "--moe-router-topk 1 leaves the router without a gradient: add --moe-router-pre-softmax, or choose 2",
        "--moe-router-pre-softmax",
    ),
    (
        "a list of layers with experts is of all layers",
        "--num-experts 4 --moe-layer-freq [0]+[1]*2",
        "--moe-layer-freq [0]*1+[1]*2 is of 3 layers, not of --num-layers 4: give one each",
        "--moe-layer-freq ([0]+[1])*2",
    ),
    (
        "a list of layers with experts is of all layers",
        "--num-experts 4 --moe-layer-freq [0]*4",
        "--moe-layer-freq [0]*4 leaves no layer with experts: write 1 for some",
        "--moe-layer-freq [0]*3+[1]",
    ),
    (
        "tensor-parallel ranks divide each expert",
        "--num-experts 4 --model-parallel-size 4 --moe-ffn-hidden-size 6",
        "--moe-ffn-hidden-size 6 is not a multiple of --model-parallel-size 4: use 4 or 8",
        "--moe-ffn-hidden-size 8",
    ),
    (
        "experts are split as the other layers are",
        "--num-experts 4 --model-parallel-size 2 --expert-tensor-parallel-size 1",
        "--expert-tensor-parallel-size 1 differs from --model-parallel-size 2: use 2",
        "--expert-tensor-parallel-size 2",
    ),
    (
        "experts are split as the other layers are",
        "--expert-tensor-parallel-size 2",
        "--expert-tensor-parallel-size 2 has no effect without --num-experts",
        "--expert-tensor-parallel-size 1",
    ),
    (
        "expert-parallel ranks divide the experts",
        "--num-experts 6 --expert-model-parallel-size 4",
        "--num-experts 6 is not a multiple of --expert-model-parallel-size 4: use 4 or 8",
        "--num-experts 8",
    ),
    (
        "expert-parallel ranks divide the data-parallel ranks",
        "--num-experts 12 --expert-model-parallel-size 3",
        "--expert-model-parallel-size 3 does not divide the data-parallel size 8: use a divisor of it, or more",
        "--expert-model-parallel-size 4",
    ),
    (
        "expert parallelism needs ZeRO 0, 1 or 2 without offloading",
        "--num-experts 4 --expert-model-parallel-size 2 --zero-stage 3",
        "--expert-model-parallel-size does not work with --zero-stage 3: use Adam at --zero-stage 1 or 2",
        "--zero-stage 2",
    ),
    (
        "with expert parallelism ZeRO reduces and scatters gradients",
        "--num-experts 4 --expert-model-parallel-size 2 --zero-stage 1 --no-zero-reduce-scatter",
        "--expert-model-parallel-size does not work with --no-zero-reduce-scatter at --zero-stage 1: remove it",
        "--zero-stage 0",
    ),
    (
        "with expert parallelism ZeRO reduces and scatters gradients",
        "--num-experts 4 --expert-model-parallel-size 2 --zero-stage 2 --no-zero-contiguous-gradients",
        "--expert-model-parallel-size does not work with --no-zero-contiguous-gradients at --zero-stage 2",
        "--zero-stage 1",
    ),
    (
        "a mixture of experts is trained by plain means",
        "--num-experts 4 --lora-rank 2",
        "--num-experts cannot be combined with --lora-rank: adapters belong to linear layers",
        None,
    ),
    (
        "ranks that share a sample hold all experts and drop no token of it",
        "--num-experts 4 --context-parallel-size 2 --expert-model-parallel-size 2",
        "--context-parallel-size 2 cannot be combined with --expert-model-parallel-size: gradients of experts would",
        "--expert-model-parallel-size 1",
    ),
    (
        "ranks that share a sample hold all experts and drop no token of it",
        "--num-experts 4 --ds-sequence-parallel-size 2 --moe-expert-capacity-factor 1.5",
        "--ds-sequence-parallel-size 2 cannot be combined with --moe-expert-capacity-factor, which counts whole",
        None,
    ),
    (
        "with expert parallelism each stage has a layer with experts",
        "--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 2 --moe-layer-freq 4",
        "--pipeline-partition type:ParallelTransformerLayer leaves stage 1 without a layer with experts (--moe-layer-",
        "--moe-layer-freq 3",
    ),
    (
        "with expert parallelism each stage has a layer with experts",
        "--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 4 --num-layers 3 "
        "--pipeline-partition uniform",
        "--pipeline-partition uniform leaves stage 3 without a layer with experts (--moe-layer-freq 1): divide the",
        "--num-layers 8",
    ),
    (
        "with expert parallelism each stage has a layer with experts",
        "--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 2 --pipeline-partition parameters",
        "--pipeline-partition parameters may leave a stage without a layer with experts: remove it, or give the",
        "--pipeline-partition 3,1",
    ),
    (
        "with expert parallelism each stage has a layer with experts",
        "--num-experts 4 --expert-model-parallel-size 2 --pipe-parallel-size 2 --pipeline-partition 4,0",
        "--pipeline-partition 4,0 leaves stage 1 without a layer with experts (--moe-layer-freq 1): divide the layers",
        "--pipeline-partition 3,1",
    ),
    (
        "a balanced router has a loss",
        "--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
        "--moe-aux-loss-coeff 0.1 has no effect with --moe-router-load-balancing-type none: choose another type",
        "--moe-router-load-balancing-type seq_aux_loss",
    ),
]
WARNED = [
    (
        "a global batch is balanced in one micro-batch",
        "--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1 --gas 2",
        "--moe-router-load-balancing-type global_aux_loss with 2 micro-batches a step depends on their number: --gas 1",
        "--moe-router-load-balancing-type seq_aux_loss",
    ),
]
