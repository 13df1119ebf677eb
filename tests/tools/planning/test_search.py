"""The search lists what is legal, by what the rules say of each command line, and ranks what fits."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from megatron.cli import parse_run
from megatron.cli.resolve import resolve_run
from megatron.cli.validation import violations
from megatron.common.errors import ConfigError
from megatron.config.model import padded_vocabulary
from megatron.model.architectures import LLAVA, T5
from megatron.model.partition import plan as plan_stages
from megatron.tools.planning.machine import DEVICES, Machine
from megatron.tools.planning.memory import stage_memory
from megatron.tools.planning.output import describe_candidate
from megatron.tools.planning.request import Request, make_request
from megatron.tools.planning.search import search

BATCH = ["--global-batch-size", "16"]


def request_of(*words: str, devices: int = 8, device: str = "a100", **settings):
    machine = Machine(DEVICES[device], min(DEVICES[device].per_node, devices))
    return make_request([*BATCH, *words], machine, devices, **{"model": "345m", **settings})


def test_every_layout_is_listed_or_counted_with_its_reason():
    """Grids, ZeRO stages, the sequence cut or not, four kinds of recomputation, micro-batches."""
    plan = search(request_of(devices=4))
    grids = Counter(
        (one.run.parallel.model_parallel_size, one.run.parallel.pipe_parallel_size)
        for one in (*plan.fitting, *plan.superseded, *plan.too_large)
    )
    assert set(grids) == {(t, p) for t in (1, 2, 4) for p in (0, 2, 4) if t * max(p, 1) <= 4}
    # DeepSpeedEngine on four data-parallel ranks: ZeRO 1 to 3, 4 kinds of recomputation, micro-batches of 1, 2, 4.
    assert grids[1, 0] == 3 * 4 * 3
    # Four stages on one replica: ZeRO 1, as which bf16 runs at 0; 4 kinds, micro-batches of 1, 2, 4, 8, 16.
    assert grids[1, 4] == 4 * 5
    # Four tensor-parallel ranks: ZeRO 1 to 3, with the sequence cut or not.
    assert grids[4, 0] == 3 * 2 * 4 * 5
    reasons = {rejection.reason: rejection.layouts for rejection in plan.rejections}
    assert reasons["The pipeline runs at ZeRO 0 or 1"] == sum(
        2 * 4 * 2 for t in (1, 2, 4) for p in (2, 4) if t * p <= 4
    )
    assert reasons["--sequence-parallel needs --model-parallel-size"] > 0


def test_days_are_those_of_the_given_length_and_a_published_model_names_its_tokenizer():
    request = request_of("--train-iters", "7", model="llama3.1-8b", device="h100")
    assert request.tokens == 7 * 16 * 8192
    assert request.given["tokenizer_type"].value == "HuggingFaceTokenizer"
    assert request_of("--train-samples", "50").tokens == 50 * 1024


def test_of_layouts_with_the_same_sizes_those_are_listed_that_are_faster_or_smaller():
    plan = search(request_of(devices=4))
    assert plan.superseded
    for one in plan.superseded:
        sizes = (one.run.parallel.model_parallel_size, one.run.parallel.pipe_stages)
        assert any(
            (other.run.parallel.model_parallel_size, other.run.parallel.pipe_stages) == sizes
            and other.timing.total <= 1.05 * one.timing.total
            and 0.8 * other.memory.total <= one.memory.total
            for other in plan.fitting
        )


def test_layers_that_do_not_divide_are_interleaved():
    """126 layers on 16 stages as Llama 3 405B was trained (arXiv 2407.21783): 400 TFLOP/s.

    The first chunk has the embeddings only, and the last one the head.
    """
    words = "--global-batch-size 2048 --model-parallel-size 8 --pipe-parallel-size 16".split()
    request = make_request(words, Machine(DEVICES["h100"], 8), 16384, model="llama3.1-405b")
    best = search(request, any_schedule=True).fitting[0]
    assert (best.run.parallel.pipeline_schedule, best.run.parallel.chunks_per_stage) == ("interleaved", 8)
    assert [stage.num_blocks for stage in plan_stages(best.run)] == [7, *[8] * 14, 7]
    assert best.run.activation.layers_together == 0
    assert best.flops_per_device == pytest.approx(400e12, rel=0.15)
    assert parse_run(best.command, request.environ).parallel == best.run.parallel


def test_of_layouts_that_are_about_as_fast_the_one_with_the_fewest_flags_is_first():
    plan = search(request_of(devices=4))
    assert all(one.memory.total <= one.request.room and 0 < one.mfu < 1 for one in plan.fitting)
    totals = [one.timing.total for one in plan.fitting]
    alike = sum(total <= 1.05 * min(totals) for total in totals)
    assert totals[alike:] == sorted(totals)[alike:]
    assert len(plan.fitting[0].command) <= min(len(one.command) for one in plan.fitting[:alike])


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--num-experts 4 --zero-stage 1",
        "--pipeline-schedule dualpipev",
        "--seq-length 16384 --max-position-embeddings 16384 --checkpoint-activations --fp16",
        "--pipe-parallel-size 2 --rampup-batch-size 8 8 1000 --sequence-parallel",
        "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 20",
    ],
)
def test_layouts_are_what_their_flags_resolve_to(words: str) -> None:
    """Every field of each, and its memory is that of its stages."""
    check_layouts(request_of(*words.split(), devices=4))


def test_the_command_of_a_layout_is_its_run() -> None:
    """What the user gives is kept."""
    request = request_of("--model-parallel-size", "2", "--zero-stage", "1", "--batch-size", "2")
    for one in search(request).fitting:
        run = parse_run(one.command, request.environ)
        assert (run.parallel, run.train, run.activation) == (one.run.parallel, one.run.train, one.run.activation)
        assert (run.parallel.model_parallel_size, run.zero.zero_stage, run.train.micro_batch_size) == (2, 1, 2)


def test_layouts_of_an_encoder_and_a_decoder_are_what_their_flags_resolve_to() -> None:
    """The decoder's first stage has as many layers and parameters as its last one, and no head."""
    sizes = "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --decoder-seq-length 512"
    check_layouts(request_of(*sizes.split(), devices=4, model=None, architecture=T5))


def check_layouts(request: Request) -> None:
    plan = search(request, any_schedule=True)
    assert plan.fitting
    for one in (*plan.fitting, *plan.superseded, *plan.too_large):
        run, problems = resolve_run(one.given, request.environ, request.architecture)
        padded = padded_vocabulary(request.vocab_size, run.parallel.model_parallel_size, 128)
        model = replace(run.model, vocab_size=request.vocab_size, padded_vocab_size=padded)
        assert not problems and replace(run, model=model) == one.run
        assert not any(violations(one.run))
        assert one.memory.total == max(memory.total for memory in stage_memory(one.run))


def test_long_sequences_are_split_too():
    """While each rank has 8,192 tokens or more of a sample, and with less memory for activations."""
    words = "--seq-length 32768 --max-position-embeddings 32768 --zero-stage 1 --recompute-granularity full".split()
    plan = search(request_of(*words, "--model-parallel-size", "1", "--pipe-parallel-size", "0", "--batch-size", "1"))
    found = {one.run.parallel.context_parallel_size: one for one in (*plan.fitting, *plan.superseded, *plan.too_large)}
    assert found.keys() == {1, 2, 4}
    assert found[4].memory.total < found[2].memory.total < found[1].memory.total
    assert parse_run(found[4].command, found[4].request.environ).parallel == found[4].run.parallel
    assert found[1].traffic.sequence == 0 < found[2].traffic.sequence


def test_the_largest_model_fits_as_it_was_trained():
    """TP 8 x PP 64 on 3,072 devices, with and without recomputation (arXiv 2104.04473, table 1)."""
    layout = "--model-parallel-size 8 --pipe-parallel-size 64 --zero-stage 1 --batch-size 1".split()
    plan = search(request_of("--global-batch-size", "3072", *layout, devices=3072, model="1t"))
    assert {one.run.activation.recompute_granularity for one in plan.fitting} == {None, "full"}
    assert "selective" in {one.run.activation.recompute_granularity for one in plan.superseded}


def test_search_imports_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None; sys.argv[:] = ['plan.py', '--model', '345m', '--devices', '4', "
        "'--global-batch-size', '8']; sys.path.insert(0, 'tools'); import runpy; "
        "runpy.run_path('tools/plan.py', {}, '__main__')"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--explain", "--explain is not for the planner"),
        ("--deepspeed_config x.json", "--deepspeed-config x.json is not for the planner: it writes this file"),
        ("--global-batch-size 8 --swiglu --openai-gelu", "--swiglu and --openai-gelu exclude each other"),
    ],
)
def test_bad_arguments_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        request_of(*words.split())


def test_the_fastest_schedule_is_chosen() -> None:
    """A layout with a pipeline gets the schedule that leaves less time idle, by flags that make a valid run."""
    layout = ("--model-parallel-size", "1", "--pipe-parallel-size", "4", "--zero-stage", "1", "--batch-size", "1")
    request = request_of("--global-batch-size", "32", *layout, model="345m", devices=4)
    plain, chosen = search(request).fitting, search(request, any_schedule=True).fitting
    assert len(plain) == len(chosen) > 0
    assert {one.run.parallel.pipeline_schedule for one in plain} == {"1f1b"}
    assert chosen[0].timing.total < plain[0].timing.total and chosen[0].bubble < plain[0].bubble / 2
    for one in chosen:
        run = parse_run(one.command, request.environ).parallel
        assert (run.pipeline_schedule, run.model_chunks) == (
            one.run.parallel.pipeline_schedule,
            one.run.parallel.model_chunks,
        )
        assert one.fits and one.run.parallel.pipeline_schedule != "1f1b"
    given = request_of("--global-batch-size", "32", *layout, "--pipeline-schedule", "1f1b", model="345m", devices=4)
    assert {one.run.parallel.pipeline_schedule for one in search(given, any_schedule=True).fitting} == {"1f1b"}


def test_an_encoder_of_images_takes_time_and_memory():
    """A trained one three passes and its activations, a frozen one only the forward pass."""
    lines = {}
    for flag in ([], ["--freeze-vision"]):
        words = ["--images-per-micro-batch", "4", "--batch-size", "1", *flag]
        [one, *_] = search(
            request_of(*words, model="llava-1.5-7b", vocab_size=32064, architecture=LLAVA, device="h100")
        ).fitting
        text = "\n".join(describe_candidate(one, stage_memory(one.run)))
        lines[bool(flag)] = re.search(r"vision encoder computes ([\d.]+)% of the FLOPs, and keeps ([\d.]+ \w+)", text)
    trained, frozen = (float(lines[key][1]) for key in (False, True))
    assert trained > 2 * frozen > 0 and lines[False][2].endswith("GB") and not lines[True][2].endswith("GB")
