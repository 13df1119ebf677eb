"""The commands of the classic ds_pretrain_gpt2.sh and ds_pretrain_gpt2_pipe.sh train on the CPU, in small sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.programs import Programs, read_metrics

COMMON = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --batch-size 4 --train-iters 2 --lr-decay-iters 320000 --save {folder}/ck --load {folder}/ck --data-impl mmap
    --distributed-backend gloo --lr 1.5e-4 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2
    --clip-grad 1.0 --warmup 0.01 --checkpoint-activations --log-interval 1 --save-interval 10000
    --eval-interval 1000 --eval-iters 1 --tensorboard-dir {folder}/board --deepspeed
    --deepspeed_config {folder}/ds_config.json --zero-stage 0 --zero-reduce-bucket-size 50000000
    --zero-allgather-bucket-size 5000000000 --zero-contigious-gradients --zero-reduce-scatter
    --checkpoint-activations --checkpoint-num-layers 1 --partition-activations --synchronize-each-layer
    --contigious-checkpointing --metrics-file {folder}/metrics.jsonl
"""
CONFIG = {"steps_per_print": 1, "wall_clock_breakdown": True, "zero_allow_untested_optimizer": False}


@pytest.mark.parametrize(
    "processes, words, config, warnings",
    [
        (
            4,
            "--model-parallel-size 4 --checkpoint-in-cpu --profile-backward --deepspeed-activation-checkpointing "
            "--use-flash-attn",
            {
                "train_batch_size": 2048, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
                "zero_optimization": {
                    "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 50000000,
                    "reduce_bucket_size": 50000000, "overlap_comm": True,
                },
                "optimizer": {"type": "Adam", "params": {"lr": 1.5e-4, "max_grad_norm": 1.0, "betas": [0.9, 0.95]}},
            },
            [
                "--use-flash-attn has no effect: attention is torch's",
                "--zero-stage 0 has no effect: zero_optimization.stage 2 in ",
                "--zero-allgather-bucket-size 5000000000 has no effect: zero_optimization.allgather_bucket_size 500000",
                "train_batch_size 2048 in ",
            ],
        ),
        (
            2,
            "--pipe-parallel-size 2 --gas 2 --bf16",
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0},
            ["--zero-stage 0 in bf16 runs as --zero-stage 1"],
        ),
    ],
    ids=["ds_pretrain_gpt2.sh", "ds_pretrain_gpt2_pipe.sh"],
)  # fmt: skip
def test_a_classic_command_trains(
    processes: int, words: str, config: dict[str, Any], warnings: list[str], programs: Programs, tmp_path: Path
) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG | config))
    command = f"{COMMON.format(folder=tmp_path)} {words}".split()
    finished = programs.warm(processes, "pretrain_gpt2.py", *command, *programs.data_arguments).ok()
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in metrics if "lm_loss" in line] == [1, 2]
    assert metrics[0]["consumed_samples"] == (4 if "use-flash" in words else 8)
    printed = [line for line in finished.output.splitlines() if line.startswith("pretrain_gpt2.py: warning: ")]
    assert len(printed) == len(warnings), "rank 0 alone prints them"
    for line, warning in zip(printed, warnings, strict=True):
        assert line.startswith(f"pretrain_gpt2.py: warning: {warning}")
