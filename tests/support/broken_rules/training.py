"""Command lines that break a rule of megatron/cli/validation/training.py."""

BROKEN = [
    (
        "NCCL needs GPUs",
        "--distributed-backend nccl",
        "--distributed-backend nccl needs GPUs",
        "--distributed-backend gloo",
    ),
    (
        "--watchdog-minutes ends a hung run before its collectives time out",
        "--watchdog-minutes 30",
        "--watchdog-minutes 30 is too late for collectives that time out after 30 minutes",
        "--watchdog-minutes 30 --distributed-timeout-minutes 30.5",
    ),
    (
        "Muon runs at ZeRO 0 to 2 on the device",
        "--optimizer muon --zero-stage 3",
        "--optimizer muon does not work at --zero-stage 3",
        "--zero-stage 2",
    ),
    (
        "Muon runs at ZeRO 0 to 2 on the device",
        "--optimizer muon --zero-stage 1 --offload-optimizer cpu",
        "--optimizer muon cannot be offloaded",
        "--offload-optimizer none",
    ),
    (
        "Adafactor runs without ZeRO and tensor parallelism",
        "--optimizer adafactor --zero-stage 1",
        "--optimizer adafactor needs whole matrices on each rank: use --zero-stage 0, or --optimizer adam",
        "--zero-stage 0",
    ),
    (
        "an optimizer on NVMe is Adam",
        "--optimizer sgd --zero-stage 3 --offload-optimizer nvme --nvme-path d",
        "--optimizer sgd does not work with --offload-optimizer nvme",
        "--optimizer adam",
    ),
    (
        "the micro-batch average of the loss needs a mask",
        "--loss-normalization micro-batch",
        "--loss-normalization micro-batch has no effect without --eod-mask-loss",
        "--eod-mask-loss",
    ),
    ("--min-lr is at most --lr", "--min-lr 1", "--min-lr 1 is more than --lr 0.001", "--lr 1"),
    (
        "warm-up fits into the decay",
        "--lr-warmup-iters 101",
        "the warm-up of 101 iterations is longer than the decay of 100",
        "--train-iters 101",
    ),
    (
        "warm-up fits into the decay",
        "--lr-decay-style WSD --lr-wsd-decay-iters 90 --warmup 0.2",
        "the warm-up of 20 iterations and --lr-wsd-decay-iters 90 do not fit into 100",
        "--warmup 0.1",
    ),
    (
        "a batch size that varies needs --train-samples",
        "--global-batch-size 4 --rampup-batch-size 2 2 20",
        "--rampup-batch-size needs --train-samples: give it instead of --train-iters",
        None,
    ),
    ("WSD needs --lr-wsd-decay-iters", "--lr-decay-style WSD", "--lr-decay-style WSD needs", "--lr-wsd-decay-iters 5"),
    (
        "WSD needs --lr-wsd-decay-iters",
        "--lr-wsd-decay-iters 5",
        "--lr-wsd-decay-iters has no effect without --lr-decay-style WSD",
        "--lr-decay-style WSD",
    ),
    (
        "--override-lr-scheduler excludes --use-checkpoint-lr-scheduler",
        "--override-lr-scheduler --use-checkpoint-lr-scheduler",
        "--override-lr-scheduler and --use-checkpoint-lr-scheduler exclude each other",
        None,
    ),
]
