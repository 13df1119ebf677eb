"""The command of the classic ds_pretrain_gpt2.sh trains on the CPU: only sizes, precision and backend differ."""

import json
from pathlib import Path

from support.programs import Programs, read_metrics

CLASSIC = """
    --model-parallel-size 4 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --batch-size 4 --train-iters 3 --lr-decay-iters 320000 --save {ck} --load {ck}
    --data-impl mmap --distributed-backend gloo --lr 1.5e-4 --lr-decay-style cosine --min-lr 1.0e-5
    --weight-decay 1e-2 --clip-grad 1.0 --warmup 0.01 --checkpoint-activations --log-interval 1 --save-interval 10000
    --eval-interval 1000 --eval-iters 1 --deepspeed --deepspeed_config {config} --zero-stage 0
    --zero-reduce-bucket-size 50000000 --zero-allgather-bucket-size 5000000000 --zero-contigious-gradients
    --zero-reduce-scatter --checkpoint-activations --checkpoint-num-layers 1 --partition-activations
    --checkpoint-in-cpu --synchronize-each-layer --contigious-checkpointing --profile-backward
    --deepspeed-activation-checkpointing --metrics-file {metrics} --use-flash-attn
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "optimizer": {"type": "Adam", "params": {"lr": 1.5e-4, "max_grad_norm": 1.0}},
    "wall_clock_breakdown": True,
    "zero_allow_untested_optimizer": False,
}


def test_the_classic_command_trains(programs: Programs, tmp_path: Path) -> None:
    config, metrics = tmp_path / "ds_config.json", tmp_path / "metrics.jsonl"
    config.write_text(json.dumps(CONFIG))
    words = CLASSIC.format(ck=tmp_path / "ck", config=config, metrics=metrics).split()
    finished = programs.warm(4, "pretrain_gpt2.py", *words, *programs.data_arguments).ok()
    assert [line["iteration"] for line in read_metrics(metrics) if "lm_loss" in line] == [1, 2, 3]
    assert finished.output.count("pretrain_gpt2.py: warning: ") == 2, "one of ZeRO, one of attention, by rank 0 alone"
    assert (
        "--zero-reduce-bucket-size 50000000, --zero-allgather-bucket-size 5000000000 have no effect" in finished.output
    )
