"""Every command of the README and of docs/ works as it is written.

Each is read by its own program's parser and rules, at its own size and on as many processes as it starts. Those in
``REAL`` also run, in one folder and in the order of their page, at a size at which this takes seconds. What neither
happens to is in ``ELSEWHERE``, with the reason. A new command of a page is read without further ado.
"""

import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.command_lines import CUDA, SMALL, latest
from support.pages import PAGES, ROOT, Command, commands_in_blocks
from support.programs import Finished, Programs

from megatron.cli import read_run
from megatron.cli.flags import read_flags
from megatron.common.errors import ConfigError
from megatron.model.architectures import BERT, GPT2, LLAVA, T5
from megatron.tools.cluster.launch_flags import chosen_hosts, read_launch
from megatron.tools.command_line import ToolParser

ELSEWHERE = {
    r"docs/coming-from-megatron.md: ": "tests/cli/test_classic_flags.py reads them, with the JSON of their section",
    r": (DRY_RUN=1 )?bash examples/quickstart.sh": "tests/test_quickstart.py runs it",
    r": bash examples/extend_context.sh": "a run of minutes; tests/test_shipped_files.py reads what it starts",
    r": .*bash examples/mixture_of_experts.sh": "a run of minutes; tests/test_shipped_files.py reads what it starts",
    r": .*bash examples/(train_vlm|finetune_llava).sh": "tests/test_vlm_examples.py reads what they start",
    r": (bash run_tests.sh|.*pytest )": "starts these tests",
    r": (torchrun .*|python) examples/(train_small_model|show_communication).py$": "tests/test_examples.py runs them",
    r": python -m benchmarks.mutations.run": "tests/test_lab.py runs it",
    r": hf download ": "needs the internet",
    r": torchrun .* examples/pretrain_my_model.py ": "tests/training/test_model_provider.py runs it",
    r": torchrun .* examples/pretrain_gpt_megatron.py ": "tests/training/test_classic_program.py runs it",
    r": (source|pip install) ": "prepares the environment in which the tests run",
    r": mkdocs ": "tests/test_docs.py builds the site",
    r": accelerate launch --config_file plan/accelerate.yaml MY_PROGRAM$": "a program of the reader's",
    r": curl ": "needs a server; tests/tools/serving sends such requests",
    r": (ssh|ssh-keygen|ssh-copy-id) ": "needs hosts",
    r": docker build |: .*bash docker/run.sh": "needs Docker; tests/test_container_images.py reads them",
}
"""Commands that are neither read nor run here: a pattern of page and command, and why."""

SMALLEST = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --batch-size 1 --train-iters 2 --eval-iters 1 --save-interval 2 --log-interval 1 --num-workers 0 --split 8,1,1"
)
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 100, "max_position_embeddings": 8192,
}  # fmt: skip
"""config.json of a folder of Hugging Face."""
VISION = {
    "model_type": "llava", "image_token_index": 32000, "vision_feature_layer": -2,
    "text_config": {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 32064, "max_position_embeddings": 4096,
    },
    "vision_config": {
        "model_type": "clip_vision_model", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 128, "image_size": 336, "patch_size": 14,
    },
}  # fmt: skip
"""config.json of a vision-language model there."""


@dataclass
class Real:
    """How a command runs here: the flags that make it small, and the number of processes."""

    flags: str = ""
    processes: int = 1


REAL = {
    r"docs/getting-started.md: python tools/train_tokenizer.py ": Real("--vocab-size 300"),
    r"README.md: python tools/preprocess_data.py ": Real("--workers 1"),
    r"docs/getting-started.md: deepspeed .* pretrain_gpt2.py ": Real(f"{SMALLEST} --global-batch-size 4", 4),
    r"README.md: python tools/generate.py ": Real(),
    r"README.md: python pretrain_gpt2.py ": Real(SMALLEST),
    r"docs/data.md: python pretrain_gpt2.py --mock-data ": Real(SMALLEST),
    r"docs/data.md: python tools/audit_data.py batch ": Real("--iteration 1"),
    r"docs/data.md: python tools/audit_data.py proof ": Real(),
    r"docs/generation.md: python tools/generate.py .* --sample-input-file ": Real("--new-tokens 2"),
    r"docs/generation.md: python tools/generate.py .* --genfile ": Real("--num-samples 2 --new-tokens 2"),
    r"docs/evaluation.md: python tools/evaluate.py --task (LAMBADA|WIKITEXT|PPL) ": Real(),
    r"docs/multinode.md: cp hostfile.example hostfile$": Real(),
}
"""Commands that run: a pattern of page and command, and how."""
PASSES_ON = (
    "tools/verify_layout.py", "tools/verify_communication.py",
    "tools/plan.py", "tools/rehearse.py", "tools/doctor.py", "tools/audit_data.py",
    "tasks/main.py",
)  # fmt: skip
"""Tools that also take the flags of a training program."""
IN_EVERY_FOLDER = 3
"""So many of them, from the first, make the data set and the checkpoint that the others need."""


@pytest.fixture(scope="module")
def prepared(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README leaves it: with a data set, a vocabulary, a trained model and other files it names."""
    folder = tmp_path_factory.mktemp("reader")
    programs.data_arguments  # noqa: B018, which makes the corpus
    shutil.copy(programs.folder / "corpus.jsonl", folder / "my.jsonl")
    shutil.copy(ROOT / "hostfile.example", folder / "hostfile")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "my.txt").write_text("w1 w2 w3 w4 w5 w6 w7\n" * 40)
    (folder / "wiki.test.tokens").write_text(" = Words = \n w1 w2 w3 w4 . \n" * 20)
    (folder / "lambada_test.jsonl").write_text('{"text": "w1 w2 w3 w4"}\n' * 4)
    (folder / "in.jsonl").write_text('{"prompt": "w1 w2"}\n' * 2)
    for name, config in {"llama-3.2-1b": LLAMA, "llava-new": VISION}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    for pattern in list(REAL)[:IN_EVERY_FOLDER]:
        (command,) = [command for command in COMMANDS if re.match(pattern, f"{command.page}: {command.text}")]
        run(programs, folder, command).ok()
    for name in ("vocab.json", "merges.txt"):
        (folder / "quickstart").mkdir(exist_ok=True)
        shutil.copy(folder / "vocab" / name, folder / "quickstart")
    for ending in (".bin", ".idx"):
        shutil.copy(folder / f"data/my_text_document{ending}", folder / f"quickstart/corpus_text_document{ending}")
    shutil.copytree(folder / "checkpoints" / "my", folder / "checkpoints" / "laptop")
    shutil.copy(folder / "runs" / "my.jsonl", folder / "runs" / "laptop.jsonl")
    return folder


COMMANDS = [command for page in PAGES for command in commands_in_blocks(page)]
NAMES = list(dict.fromkeys(command.page for command in COMMANDS))


def entry(table: Mapping[str, Any], command: Command) -> Any:
    """What a table says about a command; None if it has no entry."""
    text = f"{command.page}: {command.text}"
    return next((value for pattern, value in table.items() if re.search(pattern, text)), None)


@pytest.mark.parametrize("table", [ELSEWHERE, REAL], ids=["elsewhere", "real"])
def test_no_entry_is_left_over(table: Mapping[str, Any]) -> None:
    texts = [f"{command.page}: {command.text}" for command in COMMANDS]
    assert [pattern for pattern in table if not any(re.search(pattern, text) for text in texts)] == []


@pytest.mark.parametrize("page", NAMES)
def test_commands_are_read_by_their_programs(page: str, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At their own size: every flag is known, and every run is legal on the processes that the command starts."""
    monkeypatch.chdir(prepared)
    problems = []
    for command in COMMANDS:
        if command.page == page and entry(ELSEWHERE, command) is None:
            problems += [f"{command}\n    {problem}" for problem in problems_of(command, monkeypatch)]
    assert not problems, "\n".join(problems)


def test_deepspeed_is_started_so_that_its_launcher_is_silent() -> None:
    """At the level "info" it repeats the whole command after the error of a rank, and over pdsh at each level."""
    started = [command for command in COMMANDS if "deepspeed" in command.words[:1]]
    loud = [c for c in started if c.words[1:3] != ("--log_level", "critical") or "--hostfile" in c.words]
    assert started and not loud


@pytest.mark.parametrize("page", [page for page in NAMES if any(entry(REAL, c) for c in COMMANDS if c.page == page)])
def test_commands_run(page: str, programs: Programs, prepared: Path, tmp_path: Path) -> None:
    """One after the other, as a reader of the page would type them."""
    folder = tmp_path / "folder"
    shutil.copytree(prepared, folder)
    made = list(REAL.values())[:IN_EVERY_FOLDER]
    for command in COMMANDS:
        if command.page != page or (how := entry(REAL, command)) is None or how in made:
            continue
        finished = run(programs, folder, command)
        assert finished.returncode == 0, f"{command}\n{finished.output[-3000:]}"


def run(programs: Programs, folder: Path, command: Command) -> Finished:
    """A command at its small size, in ``folder``; a launcher's processes without the launcher."""
    how: Real = entry(REAL, command)
    place = script_of(command.words)
    here = Programs(folder, programs.folder)
    if place is None:
        return here.run(*[str(ROOT / word) if (ROOT / word).is_file() else word for word in command.words])
    words = latest([str(ROOT / command.words[place]), *command.words[place + 1 :], *how.flags.split()])
    return here.warm(how.processes, *words)


def problems_of(command: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What is wrong with a command, read by the program that it starts."""
    if entry(REAL, command) is not None and script_of(command.words) is None:
        return
    words = completed(command.words)
    if (place := script_of(words)) is None:
        yield "starts no program of this project: say in ELSEWHERE what becomes of it"
        return
    program, arguments = os.path.relpath(ROOT / words[place], ROOT), words[place + 1 :]
    environ = {**CUDA, "WORLD_SIZE": str(processes_of(words[:place])), **command.variables}
    if program == "benchmarks/gpu.sh":
        program = "benchmarks/gpu/command.py"
    if program == "tools/launch.py":
        launch = read_launch(arguments)
        flags = arguments[: arguments.index(launch.script)]
        started = ("deepspeed", *flags, launch.script, *launch.arguments)
        yield from problems_of(command._replace(words=started), monkeypatch)
    elif program.endswith((".sh", ".sbatch")):
        nodes = words[words.index("--nodes") + 1] if "--nodes" in words[:place] else "2"
        for shown in shown_by_script(program, arguments, command.variables):
            started = [f"-n={8 * int(nodes)}" if word == "--kill-on-bad-exit=1" else word for word in shown]
            found = problems_of(command._replace(words=tuple(started)), monkeypatch)
            # A flag that is passed on to a script replaces one of the script's own.
            yield from (line for line in found if not re.match(r"warning: .* has no effect: .* follows it", line))
    elif program in TRAINING:
        try:
            parsed = read_run(arguments, environ, TRAINING[program])
        except ConfigError as error:
            yield from error.messages
        else:
            yield from (*parsed.problems, *(f"warning: {warning}" for warning in parsed.warnings))
    else:
        yield from problems_of_tool(program, arguments, monkeypatch)


TRAINING = {spec.program: spec for spec in (GPT2, BERT, LLAVA, T5)}
PLACEHOLDER = "..."


def completed(words: Sequence[str]) -> list[str]:
    """The words of a command with arguments in place of its ``...``; the command's own come last, and count."""
    text = list(words)
    for meaning in (["ARGUMENTS", "OF", "pretrain_gpt2.py"], ["ARGUMENTS"]):
        if meaning[0] in text:
            place = text.index(meaning[0])
            text[place : place + len(meaning)] = [PLACEHOLDER]
    if text[0] == PLACEHOLDER:
        text = ["python", "pretrain_gpt2.py", *text]
    if PLACEHOLDER not in text:
        return text
    text.remove(PLACEHOLDER)
    place = max(n for n, word in enumerate(text) if word.endswith(".py"))
    given = SMALL.replace("--train-iters 100", "") if "--train-samples" in text else SMALL
    common = [] if text[place] in ("tasks/main.py", "tools/doctor.py") else given.split()
    return [*text[: place + 1], *latest([*common, *text[place + 1 :]])]


def script_of(words: Sequence[str]) -> int | None:
    """The place of the program of this project that a command starts."""
    names = (n for n, word in enumerate(words) if re.search(r"\.(py|sh|sbatch)$", word) and (ROOT / word).is_file())
    return next(names, None)


def processes_of(launcher: Sequence[str]) -> int:
    """How many processes a launcher with these words starts."""
    if launcher[0] == "deepspeed":
        launch = read_launch([*launcher[1:], "x.py"])
        hosts = chosen_hosts(launch)
        return sum(len(host.slots) for host in hosts) or launch.num_gpus
    text = " ".join(launcher)
    numbers = re.findall(r"(?:--nproc_per_node|--num_processes|--nnodes|-n)[ =](\d+)", text)
    return math.prod(map(int, numbers))


def shown_by_script(script: str, arguments: Sequence[str], variables: Mapping[str, str]) -> list[list[str]]:
    """The words of each command that a script of ours would run."""
    slurm = {"SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "localhost"}
    path = f"{ROOT}/tests/support/slurm:/usr/bin:/bin"
    environ = {"PATH": path, "DRY_RUN": "1", **slurm, **variables}
    command = ["bash", str(ROOT / script), *arguments]
    folder = ROOT if script.endswith(".sbatch") else None  # from where sbatch is called
    shown = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line) for line in shown.splitlines()]


class _Parsed(Exception):
    """The arguments of a tool have been read: the values, and what is left for another program."""


def problems_of_tool(script: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What a tool's own parser says; what it passes on is read as flags of a training program."""
    read, depth = ToolParser.parse_known_args, 0

    def read_and_stop(self: ToolParser, *given: Any) -> Any:
        nonlocal depth
        depth += 1  # a sub-command has a parser of its own
        result = read(self, *given)
        depth -= 1
        if not depth:
            raise _Parsed(result[1])
        return result

    with monkeypatch.context() as patch:
        patch.syspath_prepend(str((ROOT / script).parent))
        patch.setattr(sys, "argv", [str(ROOT / script), *arguments])
        patch.setattr(ToolParser, "parse_known_args", read_and_stop)
        try:
            runpy.run_path(str(ROOT / script), run_name="program")["main"]()
        except ConfigError as error:
            yield from error.messages
        except _Parsed as parsed:
            (left,) = parsed.args
            if left and script not in PASSES_ON:
                yield f"unknown: {' '.join(left)}"
            yield from read_flags([word for word in left if not word.endswith(".py")])[1]
