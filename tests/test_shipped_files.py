"""Example scripts, DeepSpeed configs and the example hostfile work as they are shipped."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_lines import CPU, CUDA
from support.programs import BIN, Programs, read_metrics

from megatron.cli import parse_run
from megatron.common.errors import ConfigError
from megatron.config import RunConfig
from megatron.data.indexed_dataset import IndexedDataset
from megatron.launch.environment import free_port
from megatron.model.architectures import ARCHITECTURES
from megatron.model.spec import active_parameters, parameter_counts

ROOT = Path(__file__).resolve().parents[1]
PLAIN, PIPE, TORCHRUN = "ds_pretrain_gpt2.sh", "ds_pretrain_gpt2_pipe.sh", "pretrain_gpt2_distributed.sh"
MULTINODE, SLURM = "ds_pretrain_gpt2_multinode.sh", "ds_pretrain_gpt2.sbatch"
ELASTIC = "ds_pretrain_gpt2_elastic.sbatch"
BERT_SCRIPT = "pretrain_bert_distributed.sh"
SCRIPTS = (PLAIN, PIPE, TORCHRUN, BERT_SCRIPT)
SCRIPTS_FOR_HOSTS = (MULTINODE, SLURM, ELASTIC)
FINETUNING = "finetune_llama.sh"
EXTENSION = "extend_context.sh"
EXPERTS = "mixture_of_experts.sh"
EVALUATION = "evaluate_lambada.sh"  # tests/tools/evaluation/test_evaluate.py runs it


def command_of(script: str, *arguments: str, **variables: str) -> list[str]:
    """The words of the command that an example would run; Slurm is ``support/slurm``."""
    return shlex.split(dry_run_of(script, *arguments, **variables))


def dry_run_of(script: str, *arguments: str, **variables: str) -> str:
    """What an example prints with DRY_RUN=1."""
    words = ["bash", str(ROOT / "examples" / script), *arguments]
    environ = {"PATH": f"{FAKE_SLURM}:/usr/bin:/bin", "DRY_RUN": "1", **SLURM_JOB, **variables}
    if script == MULTINODE:
        environ = {"HOSTFILE": str(ROOT / "hostfile.example"), **environ}
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout


FAKE_SLURM = ROOT / "tests" / "support" / "slurm"
SLURM_JOB = {"SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "localhost"}


def run_of(script: str, *arguments: str, **variables: str) -> RunConfig:
    """The run that an example would start."""
    words = command_of(script, *arguments, **variables)
    program, architecture = next(
        (place, architecture)
        for place, word in enumerate(words)
        for architecture in ARCHITECTURES.values()
        if word.endswith(architecture.program)
    )
    sizes = [words[place + 1] for place, word in enumerate(words) if word in ("--num_gpus", "--nproc_per_node")]
    processes = sizes[0] if sizes else "16"  # two hosts, in hostfile.example and for Slurm
    return parse_run(words[program + 1 :], {**variables, "WORLD_SIZE": processes}, architecture)


@pytest.mark.parametrize(
    ("script", "layout", "zero_stage"),
    [
        *((PLAIN, (1, 0, 8), 2), (PIPE, (2, 2, 2), 1), (TORCHRUN, (1, 0, 8), 1), (BERT_SCRIPT, (1, 0, 8), 1)),
        *((MULTINODE, (2, 2, 4), 1), (SLURM, (2, 2, 4), 1), (ELASTIC, (2, 2, 2), 1)),
    ],
)
@pytest.mark.parametrize(("environ", "dtype"), [(CPU, "fp32"), (CUDA, "fp16")], ids=["cpu", "cuda"])
def test_a_script_starts_its_run(script, layout, zero_stage, environ, dtype) -> None:
    run = run_of(script, "--seed", "7", **environ)
    model, parallel = run.model, run.parallel
    tokens = 512 if script == BERT_SCRIPT else 1024
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (24, 1024, 16)
    assert run.data.seq_length == model.max_position_embeddings == tokens
    assert (parallel.model_parallel_size, parallel.pipe_parallel_size, parallel.data_parallel_size) == layout
    assert (run.zero.zero_stage, run.precision.dtype, run.train.global_batch_size) == (zero_stage, dtype, 64)
    assert run.activation.checkpoint_activations and not run.activation.partition_activations
    assert run.train.seed == 7, "further arguments are passed on"


def variables_of(script: str) -> dict[str, str]:
    """Each environment variable that a script reads, with its default."""
    text = (ROOT / "examples" / script).read_text()
    if script == PIPE:
        text += (ROOT / "examples" / PLAIN).read_text()
    if "tools/gpt2_345m.sh" in text:
        text += (ROOT / "tools" / "gpt2_345m.sh").read_text()
    return dict(re.findall(r"^([A-Z_]+)=\$\{\1:?-(.*?)\}(?: |$)", text, re.MULTILINE))


REQUIRED = {
    "NODES": {"HOSTFILE": "hostfile.example"},
    "NODE_RANK": {"MASTER_ADDR": "worker-1", "NODES": "2"},
    "INTERFACE": {"LAUNCHER": "openmpi"},
}
"""Variables that another variable requires."""
UNSEEN = {ELASTIC: ("REQUEUES",)}


@pytest.mark.parametrize("script", [*SCRIPTS, *SCRIPTS_FOR_HOSTS, FINETUNING, EVALUATION])
def test_every_variable_changes_the_command(script, tmp_path) -> None:
    # This one is given to the ranks in their environment, and to no command.
    variables = {name: default for name, default in variables_of(script).items() if name not in UNSEEN.get(script, ())}
    (tmp_path / "hostfile").write_text("worker-1 slots=8")
    plain, unused = command_of(script), []
    for variable, default in variables.items():
        value = {"0": "1", "1": "0"}.get(default, "77")
        others = {"TP": "3", "NODES": "3", "NODE_RANK": "1", "LAUNCHER": "mpich"}
        value = {"HOSTFILE": str(tmp_path / "hostfile"), **others}.get(variable, value)
        required = REQUIRED.get(variable, {})
        expected = command_of(script, **required) if required else plain
        unused += [variable] if command_of(script, **required, **{variable: value}) == expected else []
    assert unused == []


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HOSTFILE": "missing"}, "missing: no such hostfile: copy hostfile.example"),
        ({"INCLUDE": "worker-1:0", "LAUNCHER": "mpich"}, "INCLUDE and SSH_PORT require LAUNCHER=pdsh"),
        ({"SSH_PORT": "2222", "LAUNCHER": "openmpi"}, "INCLUDE and SSH_PORT require LAUNCHER=pdsh"),
        ({"INTERFACE": "eth1"}, "INTERFACE requires LAUNCHER=openmpi"),
        ({"NODE_RANK": "1"}, "NODE_RANK requires MASTER_ADDR"),
        ({"NODE_RANK": "9", "MASTER_ADDR": "worker-1"}, "NODE_RANK is 9: give this host's number in"),
        ({"LAUNCHER": "ssh"}, "LAUNCHER=ssh: give pdsh, openmpi or mpich"),
    ],
)
def test_variables_for_hosts_that_contradict_each_other(variables, words) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        command_of(MULTINODE, **variables)
    assert caught.value.returncode == 2
    assert caught.value.stderr.startswith(f"{MULTINODE}: error: {words}")


@pytest.mark.parametrize(
    ("script", "variable", "value"),
    [
        (PLAIN, "CPU_OPTIMIZER", "yes"),
        (PLAIN, "CPU_OPTIMIZER", "2"),
        ("finetune_llama.sh", "CHECKPOINT_ACTIVATIONS", "off"),
        ("quickstart.sh", "DRY_RUN", "true"),
        ("../recipes/gpt-125m.sh", "COMPILE", "no"),
        ("../recipes/gpt-125m.sh", "GPUS", "x"),
        (PLAIN, "GPUS", "08"),
        (PLAIN, "NODES", "-1"),
        (PLAIN, "NODES", "2"),  # without a hostfile
        (TORCHRUN, "NODE_RANK", "1"),
        (BERT_SCRIPT, "NODE_RANK", "1"),
        (MULTINODE, "TP", "1.5"),
        (BERT_SCRIPT, "GPUS", "0"),
        ("quickstart.sh", "TP", "abc"),
        ("quickstart.sh", "PROCESSES", "a[$(touch x)]"),
        ("train_vlm.sh", "PP", "two"),
        ("extend_context.sh", "FACTOR", "99999999999999999999"),
        ("mixture_of_experts.sh", "PROCESSES", "0"),
        ("finetune_llava.sh", "LORA_RANK", "1e3"),
        (ELASTIC, "RANKS", "eight"),
        ("../recipes/gpt-125m.sh", "LAUNCHER", "slurm"),
    ],
)
def test_a_value_that_a_setting_has_not_is_refused(script: str, variable: str, value: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        command_of(script, **{variable: value})
    assert caught.value.returncode == 2 and not caught.value.stdout
    assert value in caught.value.stderr and caught.value.stderr.count("\n") == 1


def test_config_that_contradicts_the_variables_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--zero-stage 2 and zero_optimization.stage 3 in .*zero3.json"):
        run_of(PLAIN, "--deepspeed_config", str(ROOT / "ds_configs" / "zero3.json"), **CUDA)


def test_shellcheck_passes() -> None:
    scripts = [f"{path.parent.name}/{path.name}" for kind in ("sh", "sbatch") for path in ROOT.glob(f"*/*.{kind}")]
    scripts += ["run_tests.sh", ".ci/run", "tests/support/slurm/srun", "tests/support/slurm/scontrol"]
    words = [str(BIN / "shellcheck"), "--external-sources", *scripts]
    finished = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout


def test_the_context_is_extended_by_yarn() -> None:
    """The script trains a model with rotary positions, and the same one on sequences that are longer by the factor."""
    lines = [
        line for line in dry_run_of(EXTENSION, "--fast", VIRTUAL_ENV=sys.prefix).splitlines() if "pretrain" in line
    ]
    flags = [shlex.split(line.partition("pretrain_gpt2.py")[2]) for line in lines]
    short, long = (parse_run(words, {**CPU, "WORLD_SIZE": "2"}) for words in flags)
    assert (short.data.seq_length, long.data.seq_length, long.model.max_position_embeddings) == (256, 1024, 1024)
    assert (short.checkpoint.save, long.checkpoint.finetune) == (long.checkpoint.load, True)
    kinds = [run.model.position_embedding_type for run in (short, long)]
    assert kinds == ["rope", "yarn"] and short.model.position_weights == long.model.position_weights
    assert long.model.yarn_original_max_position_embeddings * long.model.yarn_rotary_scaling_factor == 1024


def test_experts_are_compared_with_as_many_active_parameters() -> None:
    lines = [line for line in dry_run_of(EXPERTS, VIRTUAL_ENV=sys.prefix).splitlines() if "pretrain" in line]
    flags = [shlex.split(line.partition("pretrain_gpt2.py")[2]) for line in lines]
    dense, experts = (parse_run(words, {**CPU, "WORLD_SIZE": "2"}) for words in flags)
    assert experts.model.has_experts and experts.parallel.expert_model_parallel_size == 2
    assert active_parameters(dense.model) == parameter_counts(dense.model)[0] == active_parameters(experts.model)
    assert (dense.train, dense.optim, dense.data) == (experts.train, experts.optim, experts.data)


TINY = {
    **{"LAYERS": "4", "HIDDEN": "32", "HEADS": "4", "SEQ_LENGTH": "32", "LR": "1e-3"},
    **{"MICRO_BATCH": "2", "GLOBAL_BATCH": "8", "ITERATIONS": "2", "GPUS": "2"},
}


def test_the_script_for_slurm_trains(programs: Programs, tmp_path) -> None:
    """A tiny model on two CPU processes, through the variables; its first loss is that of a guess."""
    prefix, vocabulary = (programs.data_arguments[place] for place in (1, 3))
    files = {"DATA": prefix, "VOCAB": vocabulary, "MERGES": "", "SAVE": str(tmp_path / "saved")}
    finished = programs.run(
        "bash", f"examples/{SLURM}", *programs.data_arguments[4:], "--num-workers", "0", "--log-interval", "1",
        "--eval-iters", "1", "--metrics-file", tmp_path / "metrics",
        MASTER_PORT=str(free_port()), PATH=f"{FAKE_SLURM}:{BIN}:{os.environ['PATH']}", **SLURM_JOB,
        **CPU, **TINY, **files, TP="1", SLURM_NTASKS="2", TORCH_CPP_LOG_LEVEL="WARNING",
    ).ok()  # fmt: skip
    layout = "TP 1 x PP 2 x DP 1, pipeline engine, 2 stages, ZeRO 1"
    assert f"> layout    2 processes = {layout}" in finished.output
    assert finished.output.count("> layout") == 1, "one rank prints"
    assert "TCPStore" not in finished.output, "every rank has left the store before its host ends"
    losses = [line["lm_loss"] for line in read_metrics(tmp_path / "metrics") if "lm_loss" in line]
    assert len(losses) == 2 and losses[0] == pytest.approx(math.log(92), abs=0.2)
    assert (tmp_path / "saved" / "latest").read_text() == "global_step2"


CHAT = [
    [{"role": "user", "content": f"{n} and {m}?"}, {"role": "assistant", "content": f"{n + m}, of course."}]
    for n in (1, 2, 30)
    for m in (5, 600)
]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.role + ': ' + message.content + '\n' }}{% endif %}{% endfor %}"
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder of transformers with a small random Llama, a byte-level tokenizer and its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    folder, alphabet = tmp_path / "llama", sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    encoder.pre_tokenizer, encoder.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=encoder, eos_token="</s>", chat_template="{{ 1 }}").save_pretrained(folder)
    set_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=260, eos_token_id=256, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in CHAT))
    return folder


def loss_of_answers(folder: Path, data: Path, template: str | None = None) -> float:
    """What transformers computes with the model, the tokenizer and the template of a folder, or another one.

    The tokens are those of the data set.
    """
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    total = counted = 0.0
    for number, messages in enumerate(CHAT):
        found = tokenizer.apply_chat_template(
            messages, chat_template=template, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
        )
        assert found["input_ids"][0].tolist() == IndexedDataset(str(data)).get(number).tolist()
        tokens, answers = found["input_ids"][0], found["assistant_masks"][0].bool()
        rows = model(tokens[None]).logits[0, :-1][answers[1:]]
        total += cross_entropy(rows, tokens[1:][answers[1:]], reduction="sum").item()
        counted += len(rows)
    return total / counted


def test_the_fine_tuning_script_trains_and_exports(programs: Programs, llama: Path, tmp_path: Path) -> None:
    """From a folder of transformers to a better one, by its commands in processes that have torch already.

    A global batch holds all conversations, two in each sample. The last step has a learning rate of 0.
    """
    files = {"HF_MODEL": llama, "DATA": tmp_path / "chat.jsonl", "SAVE": tmp_path / "saved", "EXPORT": tmp_path / "new",
             "CHAT_TEMPLATE": tmp_path / "chat.jinja"}  # fmt: skip
    sizes = {"SEQ_LENGTH": "64", "GLOBAL_BATCH": "3", "EPOCHS": "2.5", "WORKERS": "1", "LR": "1e-2", "SPLIT": "1"}
    flags = ("--num-workers", "0", "--log-interval", "1", "--eval-iters", "0", "--lr-decay-iters", "2")
    variables = {**CPU, **{name: str(path) for name, path in files.items()}, **sizes, "GPUS": "2", "TP": "2"}
    shown = dry_run_of(FINETUNING, *flags, "--metrics-file", str(tmp_path / "metrics"), **variables, LORA_DROPOUT="0")
    outputs = []
    for launcher, *words in map(shlex.split, shown.splitlines()):
        program = next(place for place, word in enumerate(words) if word.endswith(".py"))
        outputs.append(programs.warm(2 if launcher == "deepspeed" else 1, *words[program:]).ok().output)
    _, trained, _ = outputs
    assert "> layout    2 processes = TP 2 x PP 1 x DP 1, DeepSpeedEngine, ZeRO 1" in trained
    assert re.search("> sft       6 documents in 3 samples an epoch, .*; 3 epochs\n", trained)
    assert ": 13,312 of 64,672 parameters trained" in trained
    lines = [line for line in read_metrics(tmp_path / "metrics") if "lm_loss" in line]
    data = tmp_path / "chat_llama_chat_messages_document"
    before, *_, after = (line["lm_loss"] for line in lines)
    assert before == pytest.approx(loss_of_answers(llama, data, TEMPLATE), rel=1e-5)
    assert after == pytest.approx(loss_of_answers(tmp_path / "new", data), rel=1e-5) and after < before - 0.1


@pytest.mark.parametrize("changed", [None, "chat.jsonl", "chat.jinja", "model/tokenizer_config.json"])
def test_conversations_are_tokenized_again_if_something_has_changed(tmp_path: Path, changed: str | None) -> None:
    (tmp_path / "model").mkdir()
    for name in ("chat.jsonl", "chat.jinja", "model/tokenizer_config.json", "chat_model_chat_messages_document.idx"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (len(name), len(name)))
    if changed:
        (tmp_path / changed).touch()
    shown = dry_run_of(
        FINETUNING,
        HF_MODEL=str(tmp_path / "model"),
        DATA=str(tmp_path / "chat.jsonl"),
        CHAT_TEMPLATE=str(tmp_path / "chat.jinja"),
    )
    assert ("preprocess_data.py" in shown) == bool(changed)


@pytest.mark.parametrize(("code", "queued_again"), [(0, False), (2, False), (75, True)])
def test_interrupted_job_is_requeued(tmp_path, code, queued_again) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\necho rank $SLURM_PROCID of $SLURM_NTASKS\nexit {code}\n")
    (tmp_path / "python").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{FAKE_SLURM}:/usr/bin:/bin", "SLURM_NTASKS": "2", **SLURM_JOB}
    words = ["bash", str(ROOT / "examples" / SLURM)]
    finished = subprocess.run(words, env=environ, capture_output=True, text=True)
    lines = [f"rank {rank} of 2" for rank in range(2)] + ["scontrol requeue 71"] * queued_again
    assert (finished.returncode, sorted(finished.stdout.splitlines())) == (code, sorted(lines))


@pytest.mark.parametrize(("code", "requeues", "queued_again"), [(0, "0", False), (1, "9", True), (1, "10", False)])
def test_a_job_that_lost_too_many_hosts_is_requeued(tmp_path, code, requeues, queued_again) -> None:
    """One torchrun on each host; each may continue without the others."""
    (tmp_path / "torchrun").write_text(f"#!/bin/sh\necho $1 $2 ${{10}}\nexit {code}\n")
    (tmp_path / "torchrun").chmod(0o755)
    job = {**SLURM_JOB, "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "MIN_NODES": "1", "SLURM_RESTART_COUNT": requeues}
    environ = {"PATH": f"{tmp_path}:{FAKE_SLURM}:/usr/bin:/bin", **job}
    words = ["bash", str(ROOT / "examples" / ELASTIC)]
    finished = subprocess.run(words, env=environ, capture_output=True, text=True)
    lines = ["--nnodes 1:2 localhost:20071"] * 2 + ["scontrol requeue 71"] * queued_again
    assert (finished.returncode, finished.stdout.splitlines()) == (code, lines)
