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


OFFLOADED = '"offload_optimizer": {"device": "cpu"}'
RECOMPUTED = "--checkpoint-activations --partition-activations"
FLAGS_AND_KEYS = {
    "--global-batch-size 6 --gas 3": '{"train_batch_size": 6, "gradient_accumulation_steps": 3}',
    "--batch-size 4": '{"train_micro_batch_size_per_gpu": 4}',
    "--clip-grad 0.5": '{"gradient_clipping": 0.5}',
    "--fp16": '{"fp16": {"enabled": true}}',
    "--fp16 --initial-loss-scale 4096": '{"fp16": {"enabled": true, "initial_scale_power": 12}}',
    "--bf16": '{"bf16": {"enabled": true}}',
    "--fp32-allreduce": '{"communication_data_type": "fp32"}',
    "--zero-stage 3": '{"zero_optimization": {"stage": 3}}',
    "--no-zero-reduce-scatter": '{"zero_optimization": {"reduce_scatter": false}}',
    "--zero-reduce-bucket-size 5e6": '{"zero_optimization": {"reduce_bucket_size": 5e6}}',
    "--cpu-optimizer --zero-stage 1": f'{{"zero_optimization": {{"stage": 1, {OFFLOADED}}}}}',
    "--cpu-optimizer --cpu_torch_adam --zero-stage 1":
        f'{{"zero_optimization": {{"stage": 1, {OFFLOADED}}}, "optimizer": {{"params": {{"torch_adam": true}}}}}}',
    "--zero-stage 3 --no-zero-overlap-comm": '{"zero_optimization": {"stage": 3, "overlap_comm": false}}',
    "--bf16 --grad-accum-dtype fp32": '{"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}',
    "--zero-stage 3 --offload-optimizer cpu --no-offload-pin-memory":
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": false}}}',
    "--zero-stage 3 --offload-param cpu": '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
    "--zero-stage 3 --offload-optimizer nvme --offload-param nvme --nvme-path /x":
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},'
        ' "offload_param": {"device": "nvme", "nvme_path": "/x"}}}',
    "--lr 0.002": '{"optimizer": {"params": {"lr": 0.002}}}',
    "--adam-beta1 0.8 --adam-beta2 0.9": '{"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9]}}}',
    "--weight-decay 0.1": '{"optimizer": {"params": {"weight_decay": 0.1}}}',
    RECOMPUTED: '{"activation_checkpointing": {"partition_activations": true}}',
    f"{RECOMPUTED} --checkpoint-in-cpu":
        '{"activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true}}',
}  # fmt: skip


@pytest.mark.parametrize("words", FLAGS_AND_KEYS)
def test_flag_and_key_make_equal_runs(words: str, config_file) -> None:
    recompute = "--checkpoint-activations" if "checkpoint-act" in words else ""
    small = SMALL.replace("--lr 0.001", "").replace("--batch-size 2", "")
    lr, size = "" if "--lr" in words else "--lr 0.001", "" if "--batch" in words else "--batch-size 2"
    environ, file = {**CUDA, "WORLD_SIZE": "1"}, config_file(FLAGS_AND_KEYS[words])
    lines = (words, f"{recompute} {file}", f"{words} {file}")
    from_flags, from_file, from_both = (parse_run(f"{small} {lr} {size} {line}".split(), environ) for line in lines)
    assert from_flags == from_file == from_both != parse(environ=CUDA)


@pytest.mark.parametrize(
    "words, text, message",
    [
        ("--zero-stage 1", '{"zero_optimization": {"stage": 2}}', "--zero-stage 1 and zero_optimization.stage 2"),
        ("--bf16", '{"bf16": {"enabled": false}}', "--bf16 and bf16.enabled false"),
        ("--adam-beta2 0.9", '{"optimizer": {"params": {"betas": [0.9, 0.99]}}}',
         "--adam-beta2 0.9 and optimizer.params.betas 0.99"),
    ],
)  # fmt: skip
def test_a_contradiction_names_both_sides(words: str, text: str, message: str, config_file_errors) -> None:
    key = message.partition(" and ")[2].split()[0]
    remedy = f"delete {key} from the file to use the flag, or delete the flag"
    assert f"{message} in ds.json contradict each other: {remedy}" in config_file_errors(text, words)


NO_NORM = {"zero_optimization": {"compute_grad_norm": False}}
RATIO = {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}
MASTERS, STATES = {"bf16": {"bf16_master_weights_and_grads": True}}, {"bf16": {"bf16_optimizer_states": True}}
PRESCALED, DIVIDED_BY_4 = {"prescale_gradients": True}, {"gradient_predivide_factor": 4}


@pytest.mark.parametrize(
    "tree, words, expected",
    [
        (PRESCALED, "--zero-stage 2", "prescale_gradients true does not work with reduce-scatter"),
        (DIVIDED_BY_4, "--zero-stage 2", "gradient_predivide_factor 4 does not work at ZeRO 2"),
        (DIVIDED_BY_4, "--zero-stage 1 --no-zero-reduce-scatter --ds-sequence-parallel-size 2",
         "gradient_predivide_factor 4 does not work at ZeRO 1"),
        (NO_NORM, "--zero-stage 1 --bf16 --grad-accum-dtype fp32 --clip-grad 0",
         "compute_grad_norm false does not work with fp32 sums"),
        (NO_NORM, "--zero-stage 2", "compute_grad_norm false does not work with clipping (--clip-grad 0 turns it off)"),
        (NO_NORM, "--zero-stage 1 --cpu-optimizer --clip-grad 0",
         "compute_grad_norm false does not work with --offload-optimizer"),
        (NO_NORM, "--zero-stage 2 --clip-grad 0", None),
        (NO_NORM, "--zero-stage 3 --clip-grad 0", "compute_grad_norm false does not work with ZeRO 3, only"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "", "data_types.grad_accum_dtype fp16 contradicts a run in"),
        ({"aio": {"use_gds": True}}, "", "aio.use_gds needs a GPU, and this host has none: remove it"),
        ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "--zero-stage 3 --cpu-optimizer",
         "zero_optimization.offload_optimizer.super_offload needs a GPU"),
        (PRESCALED | DIVIDED_BY_4, "--zero-stage 1", None),
        (PRESCALED, "--zero-stage 2 --no-zero-reduce-scatter", None),
        (DIVIDED_BY_4, "--zero-stage 2 --no-zero-reduce-scatter", None),
        ({"gradient_predivide_factor": 2}, "--zero-stage 3 --no-zero-reduce-scatter", None),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "--zero-stage 2",
         "fp16_master_weights_and_grads true needs --fp16, and DeepSpeed's Adam by --offload-optimizer cpu: remove it"),
        (MASTERS, "--bf16", "bf16_master_weights_and_grads true needs --bf16, and DeepSpeed's Adam"),
        (STATES, "--bf16", 'bf16_optimizer_states true needs "bf16_master_weights_and_grads": true: add it'),
        ({"bf16": MASTERS["bf16"] | STATES["bf16"]}, "--bf16 --cpu-optimizer --cpu-torch-adam", "bf16_master"),
        ({"bf16": MASTERS["bf16"] | STATES["bf16"]}, "--bf16", None),
        (MASTERS, "--bf16 --cpu-optimizer", None),
        ({"data_types": {"param_dtype": "half"}}, "--bf16", "data_types.param_dtype half contradicts a run in bf16"),
        ({"data_types": {"param_dtype": "torch.bfloat16"}}, "--bf16", None),
        (RATIO, "--zero-stage 1 --cpu-optimizer", "zero_optimization.offload_optimizer.ratio 0.5 needs --zero-stage 3"),
        (RATIO, "--zero-stage 3 --cpu-optimizer --cpu-torch-adam", "zero_optimization.offload_optimizer.ratio"),
        (RATIO, "--zero-stage 3 --cpu-optimizer", None),
        ({"prescale_gradients": False, "gradient_predivide_factor": 1.0}, "--zero-stage 2", None),
    ],
)  # fmt: skip
def test_what_deepspeed_asserts_or_computes_wrong_is_refused(
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


def test_batch_sizes_of_a_file_fit_each_other_also_beside_a_flag(config_file_errors) -> None:
    tree = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    (printed,) = config_file_errors(tree, "--batch-size 2")
    assert printed.startswith("train_batch_size 8 in ") and "is not train_micro_batch_size_per_gpu 2 in " in printed


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
        ('{"zero_optimisation": {}}', ", line 1: zero_optimisation: unknown key, did you mean zero_optimization?"),
        ('{\n "fp16": {\n  "enable": true}}', ", line 3: fp16.enable: unknown key, did you mean enabled?"),
        ('{"xyzzy": 1}', ", line 1: xyzzy: unknown key, DeepSpeed has no such setting"),
        ('{"optimizer": {"type": "Adamm"}}', ', line 1: optimizer.type: "Adamm" must be one of Adam, AdamW, '),
        ('{"zero_optimization": {"stage": "2"}}', ', line 1: zero_optimization.stage: "2" must be one of 0, 1, 2, 3'),
        ('{"zero_optimization": true}', ", line 1: zero_optimization: true must be an object"),
        ('{"scheduler": {"type": "WarmupLR"}}', ", line 1: scheduler: the learning-rate schedule is set on the comm"),
        ('{"compile": {"deepcompile": true}}', ", line 1: compile: the model is compiled by the program: use --com"),
        ('{"comet": {"online": "no"}}', ', line 1: comet.online: "no" must be true or false, or null'),
        ('{"log_level": "shout"}', ', line 1: log_level: "shout" must be debug, info, warning, error, critical'),
        ('{"data_types": {"param_dtype": "float7"}}', ', line 1: data_types.param_dtype: "float7" must be one of'),
        ('{"torch_autocast": {"lower_precision_safe_modules": ["x"]}}',
         ', line 1: torch_autocast.lower_precision_safe_modules: ["x"] must be a list of classes'),
        ('{"torch_autocast": {"dtype": "fp32"}}', ', line 1: torch_autocast.dtype: "fp32" must be one of'),
        ('{"gradient_predivide_factor": 0}', ", line 1: gradient_predivide_factor: 0 must be a number above 0"),
        ('{"zero_optimization": {"zenflow": {}}}', ", line 1: zero_optimization.zenflow: not supported"),
        ('{"zero_optimization": {"stage3_module_granularity_threshold": 1e6}}',
         ", line 1: zero_optimization.stage3_module_granularity_threshold: DeepSpeed releases the weights"),
        ('{"flops_profiler": {"module_depth": -2}}', ", line 1: flops_profiler.module_depth: -2 must be a whole"),
        ('{"zero_optimization": {"legacy_stage1": true}}', ", line 1: zero_optimization.legacy_stage1: DeepSpeed no"),
        ('{"zero_optimization": {"leaf_module": {"names": [5]}}}', ", line 1: zero_optimization.leaf_module.names: "),
        ('{"gradient_clipping": 1,}', ", line 1, column "),
        ('{"gradient_clipping": NaN}', ": NaN is not JSON"),
        ("[1]", ": must hold a JSON object"),
        ("[" * 100_000, ": nested too deep"),
    ],
)  # fmt: skip
def test_errors_of_a_file_name_the_line(text: str, message: str, config_file_errors) -> None:
    (printed,) = config_file_errors(text)
    assert printed.startswith(f"ds.json{message}")


def test_a_refused_key_that_is_off_is_nothing(config_file_errors) -> None:
    off = '"amp": {"enabled": false}, "zero_optimization": {"zenflow": null, "legacy_stage1": false}'
    assert config_file_errors(f"{{{off}}}") == []


def test_quantized_weights_need_a_gpu(config_file_errors) -> None:
    refused = ["zero_optimization.zero_quantized_weights needs a GPU, and this host has none: remove it"]
    assert config_file_errors('{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}') == refused


def test_a_list_of_objects_has_no_duplicates(config_file_errors) -> None:
    (printed,) = config_file_errors('{"other": {"a": [{"x": 1}, {"x": 2}], "b": ["x\\":", "{"]}}')
    assert "other: unknown key" in printed


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
    assert len(SHIPPED) == 9
    assert run.precision.dtype == next((name for name in ("fp16", "bf16") if name in config), "fp32")
