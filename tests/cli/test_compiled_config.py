"""The DeepSpeed config that is compiled from a run: what each setting writes, and for which optimizer."""

import pytest
from support.command_lines import CUDA, complaints, parse, read


def test_pipelines_send_whole_tensors(config_file) -> None:
    """With sequence parallelism, these are the ranks' parts of the sequence."""
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
        "pipeline.pipe_partitioned true is not supported: use --sequence-parallel, with which tensor-parallel ranks "
        "send a part of each tensor, and set the key to false, or remove it"
    ]


def test_only_1f1b_has_deepspeeds_timers(config_file) -> None:
    words = "--pipe-parallel-size 1 --gas 2 --pipeline-schedule dualpipev"
    (message,) = complaints(f"{words} {config_file({'wall_clock_breakdown': True})}")
    assert message.startswith("wall_clock_breakdown true cannot be combined with --pipeline-schedule dualpipev")


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


def test_each_kind_of_offload_may_have_its_own_folder(config_file) -> None:
    folders = {"offload_optimizer": "/x", "offload_param": "/y"}
    tree = {name: {"device": "nvme", "nvme_path": folder} for name, folder in folders.items()}
    compiled = parse(config_file({"zero_optimization": {"stage": 3, **tree}})).ds_config["zero_optimization"]
    assert {name: compiled[name]["nvme_path"] for name in folders} == folders


@pytest.mark.parametrize(("size", "written"), [(0, None), (1.5, 2), (3, 4), (4, 4)])
def test_the_bucket_of_the_all_gather_is_even(size: float, written: int | None, config_file) -> None:
    """DeepSpeed 0.19.8 asserts it."""

    def compiled(words: str) -> int | None:
        return parse(words).ds_config["zero_optimization"].get("allgather_bucket_size")

    assert compiled(f"--zero-stage 1 --zero-allgather-bucket-size {size}") == written
    if size == int(size):
        words = config_file({"zero_optimization": {"stage": 1, "allgather_bucket_size": int(size)}})
        assert compiled(words) == (written or 0)  # 0 is DeepSpeed's default


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


@pytest.mark.parametrize("type_", ["AdamW", "Adagrad"])
def test_an_optimizer_on_the_cpu_is_not_asked_to_be_fused(type_: str, config_file) -> None:
    """It has one kernel anyway, and no such parameter. The file may be that of a run without offload."""
    tree = {"optimizer": {"type": type_, "params": {"fused": True}}}
    for offload, is_fused in (("", True), ("--offload-optimizer cpu", False)):
        config = parse(f"--zero-stage 1 {offload} {config_file(tree)}").ds_config
        assert ("fused" in config["optimizer"]["params"]) == is_fused


def test_another_optimizer_gets_the_parameters_it_takes(config_file, config_file_errors) -> None:
    params = parse(config_file({"optimizer": {"type": "adagrad"}})).ds_config["optimizer"]
    assert params == {"type": "Adagrad", "params": {"lr": 0.001, "eps": 1e-8, "weight_decay": 0.01, "fused": True}}
    for flag, message in {
        "--adam-beta1 0.5": "--adam-beta1 0.5 has no effect on optimizer SGD: remove it",
        "--muon-momentum 0.8": "--muon-momentum needs --optimizer muon: add it, or remove --muon-momentum",
    }.items():
        assert config_file_errors({"optimizer": {"type": "SGD"}}, f"{flag} --zero-stage 1") == [message]
    assert config_file_errors({"optimizer": {"type": "Lamb"}}, "--zero-stage 1") == [
        'optimizer Lamb is untested with ZeRO: use AdamW, --zero-stage 0, or "zero_allow_untested_optimizer": true',
        "optimizer Lamb needs a GPU, and this host has none: use AdamW",
    ]


@pytest.mark.parametrize(
    "flag, type_, params",
    [
        ("adam", "Adam", {"betas": [0.9, 0.999], "eps": 1e-8, "torch_adam": True, "fused": True}),
        ("sgd", "SGD", {"momentum": 0.9, "fused": True}),
        ("lion", "lion", {"betas": [0.9, 0.999]}),
        ("muon", "Muon", {"momentum": 0.95, "betas": [0.9, 0.999], "eps": 1e-8}),
        ("adafactor", "Adafactor", {}),
    ],
)
def test_the_optimizer_is_set_by_a_flag_or_the_file(config_file, config_file_errors, flag, type_, params) -> None:
    by_file, both = {"optimizer": {"type": type_}}, f"--optimizer {flag}"
    expected = {"lr": 0.001, "weight_decay": 0.01} | params
    for words in (both, config_file(by_file), f"{both} {config_file(by_file)}"):
        run = parse(words)
        assert run.optim.optimizer == flag
        assert run.ds_config["optimizer"]["params"] == expected
        assert run.ds_config["optimizer"]["type"].lower().removesuffix("w") == flag
    (message,) = config_file_errors({"optimizer": {"type": "Adagrad"}}, both)
    assert message.startswith(f'--optimizer {flag} and optimizer.type "Adagrad" in ')


def test_deepspeed_is_allowed_optimizers_that_are_right_under_zero(config_file_errors) -> None:
    assert parse("--optimizer sgd --zero-stage 1").ds_config["zero_allow_untested_optimizer"] is True
    assert "zero_allow_untested_optimizer" not in parse("--optimizer adam --zero-stage 1").ds_config
    (message,) = config_file_errors({"zero_allow_untested_optimizer": False}, "--optimizer sgd --zero-stage 1")
    assert message.startswith("optimizer SGD is untested with ZeRO")


def test_an_offloaded_lion_is_not_deepspeeds(config_file, config_file_errors) -> None:
    offloaded, force = "--zero-stage 1 --offload-optimizer cpu", "zero_force_ds_cpu_optimizer"
    config = parse(f"{offloaded} {config_file({'optimizer': {'type': 'lion'}})}").ds_config
    assert (config["optimizer"]["type"], config[force]) == ("Lion", False)
    (message,) = config_file_errors({force: True}, f"--optimizer lion {offloaded}")
    assert message.startswith(f'"{force}": true excludes Lion with --offload-optimizer')
    assert force not in parse(f"--optimizer sgd {offloaded}").ds_config
