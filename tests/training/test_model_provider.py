"""``pretrain``: a model, data and loss of one's own on every layout; defaults, flags, resuming, and what is refused."""

import errno
import json
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from support.programs import Programs, read_metrics

from megatron.cli import read_run
from megatron.common.errors import ConfigError
from megatron.config import RunConfig
from megatron.launch.rank import explanation
from megatron.model.spec import ARCHITECTURES
from megatron.training.callbacks import Callback
from megatron.training.model_provider import ModelProvider, UserCallback, provided_architecture, user_function
from megatron.training.preflight import check
from megatron.training.summary import describe_config

PROGRAM = "examples/pretrain_my_model.py"
FLAGS = "--train-iters 6 --log-interval 1 --eval-interval 3 --eval-iters 1 --lr-decay-iters 6 --lr-decay-style cosine"


def train(
    programs: Programs, processes: int, file: Path, *words: str | Path, program: str = PROGRAM
) -> dict[tuple[str, int], float]:
    """Every loss of a run, by its kind and iteration."""
    programs.warm(processes, program, *FLAGS.split(), "--metrics-file", file, *words).ok()
    kinds = ("lm_loss", "validation_loss")
    return {(kind, line["iteration"]): line[kind] for line in read_metrics(file) for kind in kinds if kind in line}


def test_layouts_agree_and_a_run_resumes(programs: Programs, tmp_path: Path) -> None:
    one = train(programs, 1, tmp_path / "one")
    assert len(one) == 8 and one["lm_loss", 6] < one["lm_loss", 1]
    line = read_metrics(tmp_path / "one")[0]
    assert line["tflops_per_device"] is None and line["grad_norm"] > 0
    pipeline = train(programs, 4, tmp_path / "four", "--model-parallel-size", "2", "--pipe-parallel-size", "2")
    assert pipeline == pytest.approx(one, rel=1e-4)
    folder, layout = tmp_path / "saved", ["--model-parallel-size", "2", "--zero-stage", "2"]
    begin = train(programs, 2, tmp_path / "begin", *layout, "--save", folder, "--exit-interval", "3")
    end = train(programs, 2, tmp_path / "end", *layout, "--load", folder)
    assert begin | end == pytest.approx(one, rel=1e-4) and len(end) == 4
    assert json.loads((folder / "global_step3" / "run.json").read_text())["config"]["extra_args"] == {"std": 0.1}
    other = programs.warm(1, PROGRAM, *FLAGS.split(), "--load", folder)
    assert other.returncode == 4
    assert "--model-parallel-size is 1, but 2 in" in other.output
    assert "a checkpoint of a model without a spec is resumed on the layout it was saved on" in other.output


def test_a_module_trains_at_zero_3_and_in_bf16(programs: Programs, tmp_path: Path) -> None:
    one = train(programs, 1, tmp_path / "one")
    module = "tests/support/own_module.py"
    words, save = ["--zero-stage", "3"], ["--save", tmp_path / "saved", "--exit-interval", "3"]
    begin = train(programs, 2, tmp_path / "begin", *words, *save, program=module)
    assert [line["answer"] for line in read_metrics(tmp_path / "begin") if "lm_loss" in line] == [42] * 3
    end = train(programs, 2, tmp_path / "end", *words, "--load", tmp_path / "saved", program=module)
    assert begin | end == pytest.approx(one, rel=1e-4) and len(end) == 4
    half = train(programs, 2, tmp_path / "half", "--model-parallel-size", "2", "--bf16", program=module)
    assert half == pytest.approx(one, rel=0.1) and half != begin | end


@pytest.fixture
def parse():
    """Parses the command line of a program that calls ``pretrain`` with these flags and defaults."""

    def parsed(words: str, add_flags=None, ranks: int = 1, **defaults) -> RunConfig:
        sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 1, "lr": 0.1}
        defaults = {**sizes, "train_iters": 1, "batch_size": 1, **defaults}
        provider = ModelProvider(*[lambda *_: None] * 3, add_flags, defaults)
        architecture = provided_architecture(provider)
        try:
            return read_run(words.split(), {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(ranks)}, architecture).checked()
        finally:
            programs.append(architecture.name)

    programs: list[str] = []
    yield parsed
    for name in set(programs):
        del ARCHITECTURES[name]


def add_flags(parser) -> None:
    parser.add_argument("--my_depth", type=int, default=3)
    parser.add_argument_group("more").add_argument("--my-name", choices=("a", "b"))
    parser.add_argument("--my-switch", action="store_true")


def test_the_command_line_wins_over_defaults_and_has_the_programs_flags(parse) -> None:
    run = parse("--lr 0.5 --micro-batch-size 4 --my-name b", add_flags, my_depth=5, bf16=True, zero_stage=1, gas=None)
    assert run.extra_args == {"my_depth": 5, "my_name": "b", "my_switch": False}
    assert (run.optim.lr, run.train.micro_batch_size, run.model.num_layers) == (0.5, 4, 2)
    assert run.precision.bf16 and run.zero.zero_stage == 1
    assert parse("--my_depth 2 --my-switch", add_flags).extra_args["my_switch"] is True


@pytest.mark.parametrize(
    ("words", "defaults", "message"),
    [
        ("--mydepth 4", {}, "unknown flag --mydepth: did you mean --my_depth?"),
        ("--my-depth x", {}, "--my_depth: invalid int value: 'x'"),
        ("--my-depth 1_0", {}, "--my_depth: invalid int value: '1_0'"),
        ("--my-name c", {}, "--my-name: invalid choice: 'c'"),
        ("--my-name=--a", {}, "--my-name: invalid choice: '--a'"),
        ("--my-depth 2 3", {}, "unexpected argument '3': every value follows its flag"),
        ("--my-switch 1", {}, "unexpected argument '1': --my-switch takes no value"),
        ("--num-layers x", {}, "--num-layers x: must be a number"),
        ("", {"numlayers": 3}, "args_defaults: unknown flag --numlayers: did you mean --num-layers?"),
        ("", {"lr": -1}, "--lr -1 must be more than 0"),
        ("--dry-run", {}, "--dry-run: the model of"),
    ],
)
def test_mistakes_in_flags_and_defaults(parse, words: str, defaults: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words, add_flags, **defaults)
    assert len(caught.value.messages) == 1 and message in caught.value.messages[0]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--hidden-size 7 --num-attention-heads 4 --model-parallel-size 3 --ffn-hidden-size 5 --num-query-groups 9",
        "--seq-length 9 --max-position-embeddings 2 --vocab-size 3",
        "--num-layers 3 --pipe-parallel-size 3",
    ],
)
def test_rules_of_transformers_do_not_apply(parse, words: str) -> None:
    sizes = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "seq_length"))
    run, _ = check(parse(words, ranks=3, **sizes))
    assert describe_config(run)["model"] and run.data.seq_length in (1, 9)
    assert run.model.vocab_size == (3 if "vocab" in words else 0)


def test_a_pipeline_needs_the_number_of_layers(parse) -> None:
    with pytest.raises(ConfigError, match="--num-layers is required"):
        parse("--pipe-parallel-size 2", ranks=2, num_layers=None)


def test_a_flag_that_exists_is_refused(parse) -> None:
    with pytest.raises(ConfigError, match="extra_args_provider adds a flag that exists already: argument --lr"):
        parse("", lambda parser: parser.add_argument("--lr"))
    with pytest.raises(ConfigError, match="^extra_args_provider: AttributeError: "):
        parse("", lambda parser: parser.add_flag("--mine"))


def test_the_help_shows_the_programs_flags(parse, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse("--help", add_flags)
    printed = capsys.readouterr().out
    assert "--my_depth MY_DEPTH" in printed and "--my-name a|b" in printed


def test_a_module_is_no_pipeline_and_data_sets_have_samples(parse) -> None:
    run = parse("--pipe-parallel-size 1")
    with pytest.raises(ConfigError, match="needs a list of layers, and model_provider returned a str"):
        ModelProvider(lambda *_: "module", *[lambda *_: None] * 2).layers(run, None)
    with pytest.raises(ConfigError, match="--num-layers 2 is the number of layers .* model_provider returned 1"):
        ModelProvider(lambda *_: ["layer"], *[lambda *_: None] * 2).layers(run, None)
    for model in (None, torch.nn.Linear(1, 1).requires_grad_(False)):
        with pytest.raises(ConfigError, match=f"model_provider returned a {type(model).__name__} without weights"):
            ModelProvider(lambda *_, model=model: model, *[lambda *_: None] * 2).module(run, None)
    refused = [
        ([None] * 3, "must return three data sets"),
        (([1], [], None), "without samples"),
        (None, "NoneType.* no"),
    ]
    for datasets, message in [*refused, ((5, [1], None), "provider: TypeError: object of type 'int' has no len")]:
        with pytest.raises(Exception, match=message):
            ModelProvider(lambda *_: None, lambda *_, datasets=datasets: datasets, lambda *_: None).open(run, (1, 1, 1))
    for loss in (None, 0.5, torch.zeros(3)):
        with pytest.raises(ConfigError, match="the loss of forward_step is a .*: return a tensor of one number"):
            ModelProvider(None, None, lambda *_, loss=loss: loss).loss(None, None, ())
    train, valid, test = ModelProvider(None, lambda *_: ([1.0, 2.0], [3.0], [4.0]), None).open(run, (5, 1, 0))
    assert train.take([1, 4])[0].tolist() == [2.0, 1.0] and (len(train), len(valid), test) == (5, 1, None)
    _, *unused = ModelProvider(None, lambda *_: ([1.0], [], []), None).open(run, (5, 0, 0))
    assert unused == [None, None], "a data set of which no sample is used may be empty"


class Broken(Callback):
    """Fails in the method ``at``."""

    at = ""

    def _reach(self, place: str) -> None:
        if place == self.at:
            raise KeyError("x")

    @contextmanager
    def around_iteration(self, iteration):
        self._reach("enter")
        yield None if self.at == "no hooks" else [self.hook]
        self._reach("leave")

    @contextmanager
    def hook(self, instruction):
        yield self._reach("hook")

    def metrics(self):
        self._reach("metrics")
        wrong = {"list": {"a": [1]}, "none": None, "number": {1: 2}, "own": {"lm_loss": 2}}
        return wrong.get(self.at, {"half": 0.5, "one": torch.ones(1)})

    def on_metrics(self, iteration, values):
        self._reach("on_metrics")

    def on_run_end(self):
        self._reach("on_run_end")


METRICS = ["metrics", "list", "none", "number", "own"]
PLACES = ["", "enter", "hook", "no hooks", "leave", *METRICS, "on_metrics", "on_run_end", "inside"]


@pytest.mark.parametrize("at", PLACES)
def test_an_error_of_a_callback_names_it(at: str) -> None:
    """And an error of what it observes stays as it is."""
    callback = UserCallback(broken := Broken())
    broken.at = at

    def train() -> None:
        with callback.around_iteration(7) as (hook,), hook("ForwardPass"):
            assert at != "inside", "the model fails"
        assert callback.metrics() == {"half": 0.5, "one": 1}
        callback.on_metrics(7, {})
        callback.on_run_end()

    method = "metrics" if at in METRICS else at if at.startswith("on") else "around_iteration"
    expected = f"in iteration 7, Broken.{method}" if at != "inside" else "the model fails"
    with pytest.raises(AssertionError if at == "inside" else ConfigError, match=expected) if at else nullcontext():
        train()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Segmentation fault. "), 6),
        (OSError(errno.ENOSPC, "No space left on device"), 7),
    ],
)
def test_an_error_of_the_host_is_not_that_of_the_callback_it_interrupts(error: Exception, code: int) -> None:
    with pytest.raises(type(error)) as caught, user_function("on_metrics"):
        raise error
    known = explanation(caught.value)
    assert known is not None and known.exit_code == code


def test_a_callback_that_fails_on_one_rank_is_one_line(programs: Programs, tmp_path: Path) -> None:
    text = (programs.root / "tests/support/own_module.py").read_text()
    before = 'return {"answer": 42}'
    assert before in text
    program = tmp_path / "program.py"
    text = text.replace("Path(__file__).resolve().parents[2]", f"Path({str(programs.root)!r})")
    program.write_text(text.replace(before, 'return {"answer": 42 / (int(__import__("os").environ["RANK"]) < 1)}'))
    finished = programs.warm(2, program, *FLAGS.split())
    assert finished.returncode == 2 and "Traceback" not in finished.output
    (line,) = (line for line in finished.output.splitlines() if "error:" in line)
    assert "error: rank 1: in iteration 1, Answer.metrics: ZeroDivisionError: division by zero (" in line
