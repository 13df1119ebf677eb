"""Command lines that break a rule of megatron/cli/validation/pipeline.py."""

BROKEN = [
    ("each stage has a layer", "--pipe-parallel-size 8", "--num-layers 4 is less than", "--num-layers 8"),
    (
        "each stage has a layer",
        "--pipe-parallel-size 4 --pipeline-schedule dualpipev --gas 8",
        "--num-layers 4 is less than the two model chunks per stage of --pipe-parallel-size 4",
        "--num-layers 8",
    ),
    (
        "each stage has a layer",
        "--pipe-parallel-size 8 --pipeline-partition uniform",
        "--pipeline-partition uniform has 5 parts to distribute, less than --pipe-parallel-size 8: use at most "
        "5 stages",
        "--num-layers 7",
    ),
    *(
        (
            "the partition fits the model",
            f"--pipe-parallel-size {stages} --pipeline-partition {method}",
            message,
            remedy,
        )
        for stages, method, message, remedy in [
            (2, "profile", "--pipeline-partition profile: choose from uniform, parameters, flops, type:REG", None),
            (2, "type:(", "--pipeline-partition type:(: that is no regular expression", None),
            (2, "type:Mamba", "--pipeline-partition type:Mamba matches no layer: the layers are WordEmbedding, ", None),
            (2, "4", "--pipeline-partition 4: give 2 numbers, one for each stage of", "--pipe-parallel-size 1"),
            (2, "1,2", "--pipeline-partition 1,2 totals 3 layers, and --num-layers is 4", "--num-layers 3"),
            (4, "2,0,1,1", "--pipeline-partition 2,0,1,1 leaves a middle stage empty", None),
            (
                2,
                "2,2 --pipeline-schedule dualpipev --gas 4",
                "--pipeline-partition 2,2: give 4 numbers, two for each stage of --pipeline-schedule dualpipev",
                "--pipeline-partition 0,2,2,0",
            ),
        ]
    ),
    (
        "a first stage without layers needs fp32 and ZeRO 0",
        "--pipe-parallel-size 2 --pipeline-partition 0,4 --zero-stage 1",
        "--pipeline-partition 0,4 leaves the first stage with the embeddings only, which works in fp32 at "
        "--zero-stage 0 only",
        "--pipeline-partition 1,3",
    ),
    (
        "--pipeline-partition needs --pipe-parallel-size",
        "--pipeline-partition 4",
        "--pipeline-partition has no effect without --pipe-parallel-size",
        "--pipe-parallel-size 1",
    ),
    (
        "--pipeline-schedule needs --pipe-parallel-size",
        "--pipeline-schedule dualpipev",
        "--pipeline-schedule has no effect without --pipe-parallel-size",
        "--pipe-parallel-size 1 --gas 2",
    ),
    (
        "DualPipeV has two micro-batches per stage",
        "--pipe-parallel-size 2 --pipeline-schedule dualpipev --gas 3",
        "--pipeline-schedule dualpipev with --pipe-parallel-size 2 needs 4 micro-batches or more, and there are 3",
        "--gas 4",
    ),
    *(
        (
            f"{flag.split()[0]} needs --pipe-parallel-size",
            flag,
            f"{flag.split()[0]} has no effect without --pipe-parallel-size",
            "--pipe-parallel-size 1 --gas 2",
        )
        for flag in ("--num-layers-per-virtual-pipeline-stage 1", "--num-virtual-stages-per-pipeline-rank 2")
    ),
    (
        "the interleaved schedule has a multiple of its stages as micro-batches",
        "--pipe-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --gas 3",
        "--pipeline-schedule interleaved with --pipe-parallel-size 2 needs a multiple of 2 micro-batches, and there "
        "are 3: use --gas 2 or 4",
        "--gas 4",
    ),
    (
        "schedules that divide the backward pass exclude --tiled-mlp",
        "--pipe-parallel-size 2 --pipeline-schedule zbh1 --tiled-mlp",
        "--pipeline-schedule zbh1 cannot be combined with --tiled-mlp",
        "--pipeline-schedule 1f1b",
    ),
    (
        "schedules that divide the backward pass exclude --compile",
        "--pipe-parallel-size 2 --pipeline-schedule zbh1 --compile",
        "--pipeline-schedule zbh1 cannot be combined with --compile",
        "--pipeline-schedule 1f1b",
    ),
    (
        "every stage has an adapter",
        "--lora-rank 4 --pipe-parallel-size 1 --pipeline-partition parameters",
        "--pipeline-partition parameters may leave a stage without a transformer layer, and so without an adapter of "
        "--lora-rank: remove it, or give the number of layers of each stage",
        "--pipeline-partition 4",
    ),
    (
        "--repartition-from needs --pipe-parallel-size",
        "--repartition-from out",
        "--repartition-from has no effect without --pipe-parallel-size",
        None,
    ),
]
