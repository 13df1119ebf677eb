"""Command lines, DeepSpeed configs and hostfiles of any content are accepted, or refused with code 2."""

import json
import string
from argparse import Namespace
from dataclasses import fields

from hypothesis import example, given
from hypothesis import strategies as st
from support.command_lines import CPU, SMALL, latest
from support.fuzzing import NUMBERS, TEXTS, VALUES, altered, damaged, outcome, scratch, unchanged

from megatron.cli import parse_run
from megatron.cli.deepspeed_json.file import TOP_KEYS
from megatron.cli.parser import names_of
from megatron.cli.provided import value_type
from megatron.config import sections
from megatron.config.fields import flag_of
from megatron.model.architectures import BERT, GPT2
from megatron.tools.cluster.hostfile import read_hostfile, select
from megatron.tools.command_line import check_values
from megatron.training.summary import describe_config, describe_stages

FLAGS = {
    name: field
    for section in sections().values()
    for field in fields(section)
    if "flag" in field.metadata and field.name != "load_hf"  # a broken folder has another exit code
    for name in names_of(field)
}
SWITCHES = [f"--{name}" for field in FLAGS.values() for name in flag_of(field).switches]
WORDS = st.one_of(
    NUMBERS.map(str), NUMBERS.map(lambda number: f"{number}"[:30]), TEXTS, st.text("0123456789.,:e-+_/ ", max_size=8)
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Flags with values that are right, nearly right or absurd."""
    words = []
    for _ in range(draw(st.integers(1, 5))):
        name = draw(st.sampled_from(sorted(FLAGS) + SWITCHES))
        field = FLAGS.get(name)
        choices = flag_of(field).choices if field else None
        value = draw(st.one_of(WORDS, st.sampled_from(choices))) if choices else draw(WORDS)
        if field is None or (value_type(field) is bool and draw(st.integers(0, 5))):
            words.append(name)
        elif draw(st.integers(0, 5)) == 0:
            words.append(f"{name}={value}")
        else:
            words += [name, value]
    return words


@example(["--checkpoint-num-layers=--"], 1, GPT2)
@example(["--data-path=--"], 1, GPT2)
@example(["--train-samples=2199023255552", "--lr-warmup-fraction=1.6e296"], 1, GPT2)
@given(command_lines(), st.sampled_from([1, 2, 6]), st.sampled_from([GPT2, BERT]))
def test_command_lines(words: list[str], ranks: int, architecture) -> None:
    line = latest([*SMALL.split(), "--save", "nowhere"]) + words
    run = outcome(lambda: parse_run(line, {**CPU, "WORLD_SIZE": str(ranks)}, architecture), 2)
    if run is not None:
        json.dumps(run.ds_config)
        describe_config(run), describe_stages(run)


CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 2},
    "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": "x"},
    "csv_monitor": {"enabled": True, "output_path": "logs"},
}
WITH_ANY_KEYS = st.dictionaries(st.sampled_from(sorted(TOP_KEYS)), VALUES, max_size=4).map(
    lambda more: {**CONFIG, **more}
)


@given(
    st.one_of(altered(CONFIG), WITH_ANY_KEYS).map(json.dumps).map(str.encode)
    | damaged(json.dumps(CONFIG, indent=1).encode())
)
def test_deepspeed_configs(content: bytes) -> None:
    with scratch() as folder:
        (folder / "ds.json").write_bytes(content)
        line = [word for word in latest(SMALL.split()) if word] + ["--deepspeed_config", str(folder / "ds.json")]
        with unchanged(folder):
            run = outcome(lambda: parse_run(line, CPU), 2)
            if run is not None:
                json.dumps(run.ds_config)
                describe_config(run), describe_stages(run)


HOSTS = b"worker-1 slots=8\r\n# a comment\n10.0.0.2 slots=4\n\nfe80::1 slots=1\n"
PARTS = st.text(string.ascii_letters + "@:,0123456789-. ", max_size=30) | st.sampled_from(
    ["worker-1:0,1", "10.0.0.2", "@"]
)


@given(damaged(HOSTS), PARTS, PARTS)
def test_hostfiles(content: bytes, include: str, exclude: str) -> None:
    with scratch() as folder:
        (folder / "hostfile").write_bytes(content)
        with unchanged(folder):
            hosts = outcome(lambda: read_hostfile(folder / "hostfile"), 2)
            for host in hosts or ():
                assert (
                    host.slots and not host.name.startswith("-") and not set(host.name) & set(" ;$`'\"\n\r|&<>(){}*?")
                )
            if hosts:
                outcome(lambda: select(hosts, include, exclude), 2)


@example(10**400, "[0, 1]")
@given(NUMBERS, st.sampled_from(["[1, inf)", "(0, inf)", "[0, 1]", "[0.01, 100]", "[-20, 20]"]))
def test_numbers_of_tools(number: float, interval: str) -> None:
    outcome(lambda: check_values(Namespace(top_p=number), {"top_p": interval}), 2)
