"""The DeepSpeed config: flags and file merged, and the errors of a file."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_lines import CUDA, SMALL, complaints, parse, read

from megatron.config.command_line import parse_run

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "ds_configs").glob("*.json"))


@pytest.fixture
def config_file(tmp_path: Path):
    """Write a config, as text or as an object; the flag that names it."""

    def write(content: Any) -> str:
        file = tmp_path / "ds.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return f"--deepspeed_config {file}"

    return write


@pytest.fixture
def errors(config_file, tmp_path: Path):
    """The messages a config is refused with, less the path of its folder."""

    def find(content: Any, words: str = "", ranks: int = 1) -> list[str]:
        messages = complaints(f"{config_file(content)} {words}", ranks=ranks)
        return [message.replace(f"{tmp_path}/", "") for message in messages]

    return find


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
def test_a_contradiction_names_both_sides(words: str, tree: dict, message: str, errors) -> None:
    key = message.partition(" and ")[2].split()[0]
    remedy = f"delete {key} from the file to use the flag, or delete the flag"
    assert f"{message} in ds.json contradict each other: {remedy}" in errors(tree, words)


@pytest.mark.parametrize(
    "tree, words, expected",
    [
        ({"prescale_gradients": True}, "--zero-stage 2", "prescale_gradients true does not work with reduce-scatter"),
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
def test_gradients_are_scaled_only_where_deepspeed_does_it_right(errors, tree: dict, words: str, expected) -> None:
    found = errors(tree, words, ranks=4)
    assert [line[: len(expected)] for line in found] == [expected] if expected else not found


def test_the_flops_profiler_is_set_in_one_place(errors) -> None:
    words = "--flops-profile-step 3 --profile-dir out"
    expected = {"enabled": True, "profile_step": 2, "output_file": "out/flops-profile.txt"}
    assert parse(words).ds_config["flops_profiler"] == expected, "DeepSpeed counts from 0 on"
    (printed,) = errors({"flops_profiler": {"enabled": True}}, words)
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


def test_sequence_parallel_tensors_are_sent_whole(config_file) -> None:
    """Else the pipeline would take the ranks' parts of the sequence for one tensor, and mix them."""
    words = "--sequence-parallel --model-parallel-size 2"
    whole = {"pipe_partitioned": False, "grad_partitioned": False}
    kept = config_file({"pipeline": {"use_reentrant": False}})
    assert parse(f"{words} --pipe-parallel-size 1", ranks=2).ds_config["pipeline"] == whole
    assert parse(f"{words} --pipe-parallel-size 1 {kept}", ranks=2).ds_config["pipeline"] == {
        "use_reentrant": False,
        **whole,
    }
    assert "pipeline" not in parse(words, ranks=2).ds_config
    asked = config_file({"pipeline": {"pipe_partitioned": True, "grad_partitioned": False}})
    assert complaints(f"{words} --pipe-parallel-size 1 {asked}", ranks=2) == [
        "pipeline.pipe_partitioned true cannot be combined with --sequence-parallel, by which no two tensor-parallel "
        "ranks send the same tensor: set it to false, or remove it"
    ]


def test_t5_sends_whole_tensors() -> None:
    """Two tensors with gradients travel between stages of the decoder."""
    run = parse("t5 --pipe-parallel-size 2 --model-parallel-size 2", ranks=4)
    assert run.ds_config["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False}


def test_dualpipev_sends_whole_tensors(config_file) -> None:
    """DeepSpeed's engine for it asserts as much, though only where tensor parallelism would cut them."""
    words = "--pipe-parallel-size 1 --gas 2 --pipeline-schedule dualpipev"
    assert parse(words).ds_config["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False}
    (message,) = complaints(f"{words} {config_file({'pipeline': {'grad_partitioned': True}})}")
    assert message.startswith("pipeline.grad_partitioned true cannot be combined with --pipeline-schedule dualpipev")
    (message,) = complaints(f"{words} {config_file({'wall_clock_breakdown': True})}")
    assert message.startswith("wall_clock_breakdown true cannot be combined with --pipeline-schedule dualpipev")
    assert "pipeline" not in parse("--pipe-parallel-size 1").ds_config


def test_whole_numbers_become_integers(config_file) -> None:
    config = parse(
        config_file({"gradient_accumulation_steps": 2.0, "zero_optimization": {"sub_group_size": 1e9}})
    ).ds_config
    assert (
        repr((config["gradient_accumulation_steps"], config["zero_optimization"]["sub_group_size"]))
        == "(2, 1000000000)"
    )


def test_deepspeed_reports_with_verbose_only() -> None:
    assert parse("--verbose --log-interval 7").ds_config["steps_per_print"] == 7


@pytest.mark.parametrize("engine", ["", "--model-parallel-size 2", "--pipe-parallel-size 2"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_at_stage_0_is_stage_1(config_file, precision: str, engine: str) -> None:
    """By default, by the flag and by the file: the same run in every respect."""
    settings = {"zero_optimization": {"stage": 0}, precision: {"enabled": True}}
    by_file = config_file(settings)
    lines = {"--zero-stage 0": 1, "": 0, by_file: 1, f"--zero-stage 0 {by_file}": 1}
    expected = parse(f"--{precision} --zero-stage 1 {engine}", ranks=2, environ=CUDA)
    assert expected.zero.zero_stage == expected.ds_config["zero_optimization"]["stage"] == 1
    for words, warned in lines.items():
        parsed = read(f"--{precision} {words} {engine}", ranks=2, environ=CUDA)
        assert parsed.checked() == expected
        assert [f"in {precision} runs as --zero-stage 1" in line for line in parsed.warnings] == [True] * warned
    assert parse("--zero-stage 0").zero.zero_stage == 0


ZERO_KEYS = [
    ("--zero-stage 1", "", ("stage",), 1),
    ("--no-zero-reduce-scatter", "--zero-stage 1", ("reduce_scatter",), False),
    ("--no-zero-contigious-gradients", "--zero-stage 1", ("contiguous_gradients",), False),
    ("--zero-reduce-bucket-size 5e6", "--zero-stage 1", ("reduce_bucket_size",), 5_000_000),
    ("--zero-allgather-bucket-size 5e6", "--zero-stage 1", ("allgather_bucket_size",), 5_000_000),
    ("--zero-overlap-comm", "--zero-stage 1", ("overlap_comm",), True),
    ("--no-zero-overlap-comm", "--zero-stage 3", ("overlap_comm",), False),
    ("--zero-round-robin-gradients", "--zero-stage 2", ("round_robin_gradients",), True),
    ("--offload-optimizer cpu", "--zero-stage 1", ("offload_optimizer", "device"), "cpu"),
    ("--cpu-optimizer", "--zero-stage 1", ("offload_optimizer", "device"), "cpu"),
    ("--offload-optimizer nvme --nvme-path d", "--zero-stage 3", ("offload_optimizer", "device"), "nvme"),
    ("--offload-optimizer nvme --nvme-path d", "--zero-stage 3", ("offload_optimizer", "nvme_path"), "d"),
    ("--offload-param cpu", "--zero-stage 3", ("offload_param", "device"), "cpu"),
    ("--offload-param nvme --nvme-path d", "--zero-stage 3", ("offload_param", "nvme_path"), "d"),
    ("--no-offload-pin-memory", "--zero-stage 3 --offload-param cpu", ("offload_param", "pin_memory"), False),
    ("--no-offload-pin-memory", "--zero-stage 1 --cpu-optimizer", ("offload_optimizer", "pin_memory"), False),
]


@pytest.mark.parametrize("words, company, key, value", ZERO_KEYS)
def test_every_flag_of_zero_changes_the_finished_config(words: str, company: str, key: tuple, value: Any) -> None:
    """And DeepSpeed, reading that config, takes the value."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    def config_value(words: str) -> Any:
        config: Any = DeepSpeedZeroConfig(**parse(words).ds_config["zero_optimization"])
        for name in key:
            config = getattr(config, name, None)
        return config

    with_flag, without = config_value(f"{company} {words}"), config_value(company)
    assert with_flag != without
    assert (str(with_flag) if key[-1] == "nvme_path" else with_flag) == value


def test_gradients_accumulate_in_the_type_that_is_asked_for() -> None:
    assert "data_types" not in parse("--bf16").ds_config
    assert parse("--bf16 --grad-accum-dtype fp32").ds_config["data_types"] == {"grad_accum_dtype": "fp32"}


def test_each_kind_of_offload_may_have_its_own_folder(config_file) -> None:
    folders = {"offload_optimizer": "/x", "offload_param": "/y"}
    tree = {name: {"device": "nvme", "nvme_path": folder} for name, folder in folders.items()}
    compiled = parse(config_file({"zero_optimization": {"stage": 3, **tree}})).ds_config["zero_optimization"]
    assert {name: compiled[name]["nvme_path"] for name in folders} == folders


@pytest.mark.parametrize(
    "words, tree, torch_adam",
    [
        ("", {}, True),
        ("--cpu-optimizer --zero-stage 1", {}, False),
        ("--cpu-optimizer --zero-stage 1 --cpu_torch_adam", {}, True),
        ("", {"optimizer": {"params": {"torch_adam": False}}}, False),
        ("", {"optimizer": {"params": {"torch_adam": True}}}, True),
        ("", {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}}, False),
    ],
)
def test_torchs_adam_steps_unless_the_cpu_or_the_file_does(
    words: str, tree: dict, torch_adam: bool, config_file
) -> None:
    config = parse(f"{words} {config_file(tree)}").ds_config
    assert config["optimizer"]["params"]["torch_adam"] is torch_adam


def test_another_optimizer_gets_the_parameters_it_takes(config_file, errors) -> None:
    params = parse(config_file({"optimizer": {"type": "adagrad"}})).ds_config["optimizer"]
    assert params == {"type": "Adagrad", "params": {"lr": 0.001, "eps": 1e-8, "weight_decay": 0.01}}
    for flag in ("--adam-beta1 0.5", "--muon-momentum 0.8"):
        assert errors({"optimizer": {"type": "SGD"}}, f"{flag} --zero-stage 1") == [
            f"{flag} has no effect on optimizer SGD: remove it",
        ]
    assert errors({"optimizer": {"type": "Lamb"}}, "--zero-stage 1") == [
        'optimizer Lamb is untested with ZeRO: use AdamW, --zero-stage 0, or "zero_allow_untested_optimizer": true',
        "optimizer Lamb needs a GPU, and this host has none: use AdamW",
    ]


@pytest.mark.parametrize(
    "flag, type_, params",
    [
        ("adam", "Adam", {"betas": [0.9, 0.999], "eps": 1e-8, "torch_adam": True, "fused": True}),
        ("sgd", "SGD", {"momentum": 0.9}),
        ("lion", "lion", {"betas": [0.9, 0.999]}),
        ("muon", "Muon", {"momentum": 0.95, "betas": [0.9, 0.999], "eps": 1e-8}),
        ("adafactor", "Adafactor", {}),
    ],
)
def test_the_optimizer_is_set_by_a_flag_or_the_file(config_file, errors, flag, type_, params) -> None:
    by_file, both = {"optimizer": {"type": type_}}, f"--optimizer {flag}"
    expected = {"lr": 0.001, "weight_decay": 0.01} | params
    for words in (both, config_file(by_file), f"{both} {config_file(by_file)}"):
        run = parse(words)
        assert run.optim.optimizer == flag
        assert run.ds_config["optimizer"]["params"] == expected
        assert run.ds_config["optimizer"]["type"].lower().removesuffix("w") == flag
    (message,) = errors({"optimizer": {"type": "Adagrad"}}, both)
    assert message.startswith(f'--optimizer {flag} and optimizer.type "Adagrad" in ')


def test_deepspeed_is_allowed_optimizers_that_are_right_under_zero(errors) -> None:
    assert parse("--optimizer sgd --zero-stage 1").ds_config["zero_allow_untested_optimizer"] is True
    assert "zero_allow_untested_optimizer" not in parse("--optimizer adam --zero-stage 1").ds_config
    (message,) = errors({"zero_allow_untested_optimizer": False}, "--optimizer sgd --zero-stage 1")
    assert message.startswith("optimizer SGD is untested with ZeRO")


def test_an_offloaded_lion_is_not_deepspeeds(config_file, errors) -> None:
    offloaded, force = "--zero-stage 1 --offload-optimizer cpu", "zero_force_ds_cpu_optimizer"
    config = parse(f"{offloaded} {config_file({'optimizer': {'type': 'lion'}})}").ds_config
    assert (config["optimizer"]["type"], config[force]) == ("Lion", False)
    (message,) = errors({force: True}, f"--optimizer lion {offloaded}")
    assert message.startswith(f'"{force}": true excludes Lion with --offload-optimizer')
    assert force not in parse(f"--optimizer sgd {offloaded}").ds_config


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
def test_errors_of_a_file_name_the_line(text: str, message: str, errors) -> None:
    separator = ", " if message.startswith("line") else ": "
    (printed,) = errors(text)
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
