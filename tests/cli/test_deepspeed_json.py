"""The DeepSpeed config: flags and file merged, and the errors of a file."""

import json
from pathlib import Path

import pytest
from support.command_lines import CUDA, SMALL, complaints, parse

from megatron.cli import parse_run

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "ds_configs").glob("*.json"))


def test_flags_alone_make_a_complete_config() -> None:
    assert parse("--gas 3 --clip-grad 0.5", ranks=2).ds_config == {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 0},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 0.001,
                "betas": [0.9, 0.999],
                "eps": 1e-8,
                "weight_decay": 0.01,
                "torch_adam": True,
                "fused": True,
            },
        },
        "steps_per_print": 2**31 - 1,
        "timers": {"throughput": {"enabled": False}},
        "wall_clock_breakdown": False,
    }


FLAGS_AND_KEYS = [
    ("--global-batch-size 6 --gas 3", {"train_batch_size": 6, "gradient_accumulation_steps": 3}),
    ("--batch-size 2", {"train_micro_batch_size_per_gpu": 2}),
    ("--clip-grad 0.5", {"gradient_clipping": 0.5}),
    ("--fp16", {"fp16": {"enabled": True}}),
    ("--fp16 --loss-scale 128", {"fp16": {"enabled": True, "loss_scale": 128}}),
    ("--fp16 --initial-loss-scale 4096", {"fp16": {"enabled": True, "initial_scale_power": 12}}),
    ("--fp16 --loss-scale-window 5", {"fp16": {"enabled": True, "loss_scale_window": 5}}),
    ("--fp16 --hysteresis 3", {"fp16": {"enabled": True, "hysteresis": 3}}),
    ("--fp16 --min-scale 4", {"fp16": {"enabled": True, "min_loss_scale": 4}}),
    ("--bf16", {"bf16": {"enabled": True}}),
    ("--fp32-allreduce", {"communication_data_type": "fp32"}),
    ("--zero-stage 3", {"zero_optimization": {"stage": 3}}),
    ("--no-zero-reduce-scatter", {"zero_optimization": {"reduce_scatter": False}}),
    ("--no-zero-contigious-gradients", {"zero_optimization": {"contiguous_gradients": False}}),
    ("--zero-reduce-bucket-size 5e6", {"zero_optimization": {"reduce_bucket_size": 5e6}}),
    ("--zero-allgather-bucket-size 5e6", {"zero_optimization": {"allgather_bucket_size": 5_000_000}}),
    (
        "--cpu-optimizer --zero-stage 1",
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    ),
    (
        "--cpu-optimizer --cpu_torch_adam --zero-stage 1",
        {
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"params": {"torch_adam": True}},
        },
    ),
    ("--zero-stage 2 --zero-overlap-comm", {"zero_optimization": {"stage": 2, "overlap_comm": True}}),
    ("--zero-stage 3 --no-zero-overlap-comm", {"zero_optimization": {"stage": 3, "overlap_comm": False}}),
    ("--zero-stage 1 --zero-round-robin-gradients", {"zero_optimization": {"stage": 1, "round_robin_gradients": True}}),
    ("--bf16 --grad-accum-dtype fp32", {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    (
        "--zero-stage 3 --offload-optimizer cpu --no-offload-pin-memory",
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
    ),
    ("--zero-stage 3 --offload-param cpu", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}),
    (
        "--zero-stage 3 --offload-optimizer nvme --offload-param nvme --nvme-path /x",
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
                "offload_param": {"device": "nvme", "nvme_path": "/x"},
            }
        },
    ),
    ("--lr 0.001", {"optimizer": {"params": {"lr": 0.001}}}),
    ("--adam-beta1 0.8 --adam-beta2 0.9", {"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9]}}}),
    ("--adam-eps 1e-6", {"optimizer": {"params": {"eps": 1e-6}}}),
    ("--weight-decay 0.1", {"optimizer": {"params": {"weight_decay": 0.1}}}),
    *(
        (f"--checkpoint-activations {needed} {flag}", {"activation_checkpointing": {**tree, key: True}})
        for flag, key, needed, tree in [
            ("--partition-activations", "partition_activations", "", {}),
            (
                "--contigious-checkpointing",
                "contiguous_memory_optimization",
                "--partition-activations",
                {"partition_activations": True},
            ),
            ("--checkpoint-in-cpu", "cpu_checkpointing", "--partition-activations", {"partition_activations": True}),
            ("--synchronize-each-layer", "synchronize_checkpoint_boundary", "", {}),
            ("--profile-backward", "profile", "", {}),
        ]
    ),
]


@pytest.mark.parametrize("words, tree", FLAGS_AND_KEYS, ids=[words for words, _ in FLAGS_AND_KEYS])
def test_flag_and_key_make_equal_runs(words: str, tree: dict, config_file) -> None:
    recompute = "--checkpoint-activations" if "checkpoint-act" in words else ""
    small = SMALL.replace("--lr 0.001", "").replace("--batch-size 2", "")
    lr, size = "" if "--lr" in words else "--lr 0.001", "" if "--batch" in words else "--batch-size 2"
    environ = {**CUDA, "WORLD_SIZE": "1"}
    from_flags = parse_run(f"{small} {lr} {size} {words}".split(), environ)
    from_file = parse_run(f"{small} {lr} {size} {recompute} {config_file(tree)}".split(), environ)
    from_both = parse_run(f"{small} {lr} {size} {words} {config_file(tree)}".split(), environ)
    assert from_flags == from_file == from_both


@pytest.mark.parametrize(
    "words, tree, message",
    [
        ("--zero-stage 1", {"zero_optimization": {"stage": 2}}, "--zero-stage 1 and zero_optimization.stage 2"),
        ("--bf16", {"bf16": {"enabled": False}}, "--bf16 and bf16.enabled false"),
        ("--loss-scale 2 --fp16", {"fp16": {"loss_scale": 4}}, "--loss-scale 2 and fp16.loss_scale 4"),
        (
            "--fp32-allreduce",
            {"communication_data_type": "bf16"},
            '--fp32-allreduce and communication_data_type "bf16"',
        ),
        (
            "--cpu-optimizer --zero-stage 1",
            {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
            '--cpu-optimizer and zero_optimization.offload_optimizer.device "none"',
        ),
        (
            "--adam-beta2 0.9",
            {"optimizer": {"params": {"betas": [0.9, 0.99]}}},
            "--adam-beta2 0.9 and optimizer.params.betas 0.99",
        ),
        (
            "--cpu-torch-adam --cpu-optimizer --zero-stage 1",
            {"optimizer": {"params": {"torch_adam": False}}},
            "--cpu-torch-adam and optimizer.params.torch_adam false",
        ),
        (
            "--batch-size 2",
            {"train_micro_batch_size_per_gpu": 4},
            "--batch-size 2 and train_micro_batch_size_per_gpu 4",
        ),
    ],
)
def test_a_contradiction_names_both_sides(words: str, tree: dict, message: str, config_file_errors) -> None:
    key = message.partition(" and ")[2].split()[0]
    remedy = f"delete {key} from the file to use the flag, or delete the flag"
    assert f"{message} in ds.json contradict each other: {remedy}" in config_file_errors(tree, words)


@pytest.mark.parametrize(
    "tree, words, expected",
    [
        ({"prescale_gradients": True}, "--zero-stage 2", "prescale_gradients true does not work with reduce-scatter"),
        (
            {"zero_optimization": {"compute_grad_norm": False}},
            "--zero-stage 1 --bf16 --grad-accum-dtype fp32",
            "compute_grad_norm false does not work with fp32 sums",
        ),
        ({"prescale_gradients": True}, "--zero-stage 3", "prescale_gradients true does not work with reduce-scatter"),
        ({"gradient_predivide_factor": 2}, "--zero-stage 2", "gradient_predivide_factor 2 does not work with reduce-s"),
        (
            {"gradient_predivide_factor": 4},
            "--zero-stage 3 --no-zero-reduce-scatter",
            "gradient_predivide_factor 4 makes",
        ),
        (
            {"gradient_predivide_factor": 4},
            "--zero-stage 1 --no-zero-reduce-scatter --pipe-parallel-size 0 --ds-sequence-parallel-size 2",
            "gradient_predivide_factor 4 makes",
        ),
        ({"prescale_gradients": True, "gradient_predivide_factor": 4}, "--zero-stage 1", None),
        ({"prescale_gradients": True}, "--zero-stage 2 --no-zero-reduce-scatter", None),
        ({"gradient_predivide_factor": 4}, "--zero-stage 2 --no-zero-reduce-scatter", None),
        ({"gradient_predivide_factor": 2}, "--zero-stage 3 --no-zero-reduce-scatter", None),
        ({"prescale_gradients": False, "gradient_predivide_factor": 1.0}, "--zero-stage 2", None),
    ],
)
def test_gradients_are_scaled_only_where_deepspeed_does_it_right(
    config_file_errors, tree: dict, words: str, expected
) -> None:
    found = config_file_errors(tree, words, ranks=4)
    assert [line[: len(expected)] for line in found] == [expected] if expected else not found


def test_the_flops_profiler_is_set_in_one_place(config_file_errors) -> None:
    words = "--flops-profile-step 3 --profile-dir out"
    expected = {"enabled": True, "profile_step": 2, "output_file": "out/flops-profile.txt"}
    assert parse(words).ds_config["flops_profiler"] == expected, "DeepSpeed counts from 0 on"
    (printed,) = config_file_errors({"flops_profiler": {"enabled": True}}, words)
    assert printed == "--flops-profile-step and flops_profiler in the JSON exclude each other: remove one"


def test_defaults_contradict_nothing(config_file) -> None:
    words = config_file({"gradient_clipping": 3, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    run = parse(words)
    assert (run.optim.clip_grad, run.zero.zero_stage, run.precision.dtype) == (3.0, 2, "bf16")


def test_auto_is_left_to_the_flags(config_file) -> None:
    tree = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    }
    run = parse(f"{config_file(tree)} --zero-stage 1")
    plain = parse("--zero-stage 1")
    assert (run.ds_config.pop("fp16"), run) == ({}, plain)


def test_keys_without_a_flag_are_passed_on(config_file) -> None:
    tree = {
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        "steps_per_print": 10,
        "wall_clock_breakdown": True,
    }
    config = parse(config_file(tree)).ds_config
    assert config["zero_optimization"]["overlap_comm"] is False
    assert (config["steps_per_print"], config["wall_clock_breakdown"]) == (10, True)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"zero_optimisation": {}}', "line 1: zero_optimisation: unknown key, did you mean zero_optimization?"),
        ('{\n "fp16": {\n  "enable": true}}', "line 3: fp16.enable: unknown key, did you mean enabled?"),
        ('{"xyzzy": 1}', "line 1: xyzzy: unknown key, DeepSpeed has no such setting"),
        ('{"optimizer": {"params": {"learning": 1}}}', "line 1: optimizer.params.learning: unknown key, "),
        ('{"optimizer": {"type": "Adamm"}}', 'line 1: optimizer.type: "Adamm" must be one of Adam, AdamW, '),
        ('{"zero_optimization": {"stage": "2"}}', 'line 1: zero_optimization.stage: "2" must be one of 0, 1, 2, 3'),
        ('{"zero_optimization": {"stage": 4}}', "line 1: zero_optimization.stage: 4 must be one of 0, 1, 2, 3"),
        ('{"zero_optimization": {"stage": true}}', "line 1: zero_optimization.stage: true must be one of 0, 1, 2, 3"),
        ('{"zero_optimization": true}', "line 1: zero_optimization: true must be an object"),
        ('{"train_batch_size": -8}', "line 1: train_batch_size: -8 must be a whole number from 1 on"),
        (
            '{"fp16": {"initial_scale_power": 128}}',
            "line 1: fp16.initial_scale_power: 128 must be a whole number from 0 to 127",
        ),
        ('{"fp16": {"enabled": 1}}', "line 1: fp16.enabled: 1 must be true or false"),
        (
            '{"gradient_clipping": 1,\n\n "gradient_clipping": 1}',
            "line 3: gradient_clipping was already given in line 1",
        ),
        (
            '{"scheduler": {"type": "WarmupLR"}}',
            "line 1: scheduler: the learning-rate schedule is set on the command line: use --lr",
        ),
        ('{"gradient_clipping": 1,}', "line 1, column "),
        ('{"gradient_clipping": NaN}', "NaN is not JSON"),
        ("[1]", "must hold a JSON object"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_errors_of_a_file_name_the_line(text: str, message: str, config_file_errors) -> None:
    separator = ", " if message.startswith("line") else ": "
    (printed,) = config_file_errors(text)
    assert printed.startswith(f"ds.json{separator}{message}")


def test_a_list_of_objects_has_no_duplicates(config_file) -> None:
    text = '{"compile": {"a": [{"x": 1}, {"x": 2}], "b": ["x\\":", "{"]}}'
    assert parse(config_file(text)).ds_config["compile"] == json.loads(text)["compile"]


def test_an_unreadable_file(tmp_path: Path) -> None:
    missing, folder, binary = tmp_path / "none.json", tmp_path, tmp_path / "binary.json"
    binary.write_bytes(b'{"a": "\xff"}')
    assert complaints(f"--deepspeed_config {missing}") == [f"--deepspeed_config {missing}: No such file or directory"]
    assert complaints(f"--deepspeed_config {folder}") == [f"--deepspeed_config {folder}: Is a directory"]
    assert complaints(f"--deepspeed_config {binary}") == [f"{binary}: not UTF-8 at byte 7"]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_shipped_configs_load_and_satisfy_deepspeed(file: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    run = parse(f"--deepspeed_config {file}", environ=CUDA)
    assert DeepSpeedConfig(dict(run.ds_config)).zero_optimization_stage == run.zero.zero_stage
    config = json.loads(file.read_text())
    assert run.precision.dtype == next((name for name in ("fp16", "bf16") if name in config), "fp32")


def test_shipped_configs_are_all_there() -> None:
    names = "zero0 zero1 zero2 zero3 zero1_offload zero3_offload bf16 fp16 3d"
    assert {file.stem for file in SHIPPED} == set(names.split())
