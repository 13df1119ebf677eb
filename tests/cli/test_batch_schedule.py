"""Three batch sizes, of which two give the third, and sizes that vary: against a loop by Megatron's rule."""

import pytest
from support.command_lines import SMALL

from megatron.cli import parse_run
from megatron.cli.batch_sizes import ramp_up, read_steps
from megatron.common.errors import ConfigError
from megatron.config.batch_schedule import BatchSchedule
from megatron.training.summary import describe_config

RAMPS = [((4, 4, 20), 12), ((2, 2, 7), 8), ((8, 4, 0), 16), ((8, 3, 50), 8), ((1, 1, 1000), 9), ((4, 4, 3), 32)]


def sizes_by_megatron(numbers: tuple[int, int, int], global_batch_size: int, iterations: int) -> list[int]:
    """Sizes of the first iterations: ``start + int(consumed / (samples / increments)) * increment``, or the last."""
    start, increment, samples = numbers
    increments, consumed, sizes = (global_batch_size - start) // increment, 0, []
    for _ in range(iterations):
        is_over = consumed >= samples or not increments
        sizes.append(global_batch_size if is_over else start + consumed * increments // samples * increment)
        consumed += sizes[-1]
    return sizes


def check(schedule: BatchSchedule, sizes: list[int], iteration: int = 0, consumed: int = 0) -> None:
    """Sizes, samples and iterations of ``schedule`` are those of a loop that starts after ``iteration``."""
    first = iteration
    for size in sizes:
        assert (schedule.consumed(iteration), schedule.size(iteration + 1)) == (consumed, size)
        assert {schedule.iterations(samples) for samples in range(consumed, consumed + size)} == {iteration}
        iteration, consumed = iteration + 1, consumed + size
    for last in range(first, iteration):
        phases = list(schedule.phases(first, last))
        ends = [*(phase.finished for phase in phases[1:]), last]
        made = [phase.size for phase, end in zip(phases, ends, strict=False) for _ in range(phase.finished, end)]
        assert made == sizes[: last - first]


@pytest.mark.parametrize(("numbers", "global_batch_size"), RAMPS)
def test_ramp_up_equals_the_loop(numbers: tuple[int, int, int], global_batch_size: int) -> None:
    steps = ramp_up(numbers, global_batch_size)
    sizes = sizes_by_megatron(numbers, global_batch_size, 400)
    check(BatchSchedule(steps), sizes)
    assert sizes[-1] == global_batch_size
    for stop in range(1, 40):  # a start at any iteration continues alike
        check(BatchSchedule(steps, stop, sum(sizes[:stop])), sizes[stop:60], stop, sum(sizes[:stop]))


def test_step_schedule_counts_tokens() -> None:
    steps = read_steps("0:4 1K:8,2.56K:6", seq_length=64)
    assert steps == ((0, 4), (15, 8), (40, 6))
    check(BatchSchedule(steps), [4] * 4 + [8] * 3 + [6] * 20)
    assert read_steps("250B:1536 0:768", 2048) == ((0, 768), (122070312, 1536))
    assert str(BatchSchedule(steps)) == "4, 8 from sample 15 on, 6 from sample 40 on"


def test_a_constant_batch_is_the_trivial_schedule() -> None:
    check(BatchSchedule(((0, 8),)), [8] * 20)
    after_another = BatchSchedule(((0, 8),), start_iteration=10, start_sample=40)
    assert [after_another.consumed(iteration) for iteration in (5, 10, 12)] == [0, 40, 56]


SAMPLES = SMALL.replace("--train-iters 100", "--train-samples 60")
RAMP = "--global-batch-size 12 --rampup-batch-size 4 4 20"


def test_iterations_and_rates_follow_from_samples() -> None:
    run = parse_run(f"{SAMPLES} {RAMP} --lr-warmup-samples 12".split(), {"DS_ACCELERATOR": "cpu"})
    train = run.train
    sizes = [train.batches.size(iteration) for iteration in range(1, train.train_iters + 1)]
    assert sizes == [4, 4, 4, 8, 12, 12, 12] and train.consumed_samples(7) == 56
    assert [train.micro_batches(iteration) for iteration in range(1, 6)] == [2, 2, 2, 4, 6]
    assert (run.optim.warmup_steps(train), run.optim.decay_steps(train), train.lr_unit) == (12, 60, "sample")
    assert describe_config(run)["batch"].endswith(
        "batches of 4 from iteration 1 (sample 0), 8 from iteration 4 (sample 12), 12 from iteration 5 (sample 20)"
    )
    stepped = parse_run(f"{SAMPLES} --step-batch-size-schedule".split() + ["0:4 320:8"], {"DS_ACCELERATOR": "cpu"})
    assert (stepped.train.global_batch_size, stepped.train.gradient_accumulation_steps) == (8, 4)
    for words, length in (("", 5), (RAMP, 10)):
        wsd = f"{SAMPLES} {words} --lr-decay-style WSD --lr-wsd-decay-samples 10"
        run = parse_run(wsd.split(), {"DS_ACCELERATOR": "cpu"})
        assert run.optim.wsd_decay_steps(run.train) == length


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{SMALL} {RAMP}", "--rampup-batch-size needs --train-samples: add it, or remove --rampup-batch-size"),
        (f"{SAMPLES} {RAMP} --lr-warmup-iters 3", "--rampup-batch-size and --lr-warmup-iters exclude each other"),
        (f"{SAMPLES} --global-batch-size 8 --step-batch-size-schedule 0:8", "exclude each other: give one"),
        (f"{SAMPLES} {RAMP.replace('4 4', '16 4')}", "starts above the global batch of 12: lower the first number"),
        (f"{SAMPLES} {RAMP.replace('4 4', '4 3')}", "it is 8, which is not a multiple of 3: choose another increment"),
        (f"{SAMPLES} {RAMP.replace('4 4', '6 3')}", "a global batch of 9 is not a multiple of --batch-size 2 x data-"),
        (f"{SAMPLES} --step-batch-size-schedule 4", 'give TOKENS:SIZE for each batch size, such as "0:768 250B:1536"'),
        (f"{SAMPLES} --step-batch-size-schedule 64:4", "the first batch size begins at 0 tokens, such as 0:768"),
        (f"{SAMPLES} --step-batch-size-schedule 0:4,1:8", "two batch sizes begin with the same sample"),
        (f"{SAMPLES.replace('60', '3')} {RAMP}", "--train-samples 3 is less than one global batch of 4"),
        (f"{SAMPLES} {RAMP} --pipe-parallel-size 2 --pipeline-schedule dualpipev", "needs 4 micro-batches or more"),
    ],
)  # fmt: skip
def test_schedules_that_do_not_fit_are_refused(words: str, message: str) -> None:
    ranks = "2" if "dualpipev" in words else "1"
    with pytest.raises(ConfigError) as caught:
        parse_run(words.split(), {"WORLD_SIZE": ranks, "DS_ACCELERATOR": "cpu"})
    assert any(message in line for line in caught.value.messages), caught.value.messages


@pytest.mark.parametrize(
    "words, sizes",
    [
        ("--batch-size 2", (8, 2, 1)),
        ("--batch-size 2 --gas 3", (24, 2, 3)),
        ("--batch-size 2 --global-batch-size 24", (24, 2, 3)),
        ("--gas 3 --global-batch-size 24", (24, 2, 3)),
        ("--global-batch-size 24", (24, 6, 1)),
        ("--batch-size 2 --gas 3 --global-batch-size 24", (24, 2, 3)),
    ],
)
def test_batch_sizes_follow_from_each_other(words: str, sizes: tuple[int, int, int]) -> None:
    small = SMALL.replace("--batch-size 2", words).split()
    train = parse_run(small, {"WORLD_SIZE": "4", "DS_ACCELERATOR": "cpu"}).train
    assert (train.global_batch_size, train.micro_batch_size, train.gradient_accumulation_steps) == sizes


@pytest.mark.parametrize(
    "words, message",
    [
        ("--gas 2", "--batch-size is required (or --global-batch-size, or their keys in --deepspeed_config)"),
        ("--global-batch-size 64 --batch-size 4 --gas 2",
         "--global-batch-size 64 is not --batch-size 4 x --gas 2 x data-parallel size 4 = 32: set a global batch of 32"
         " or an accumulation of 4"),
        ("--global-batch-size 30 --batch-size 4",
         "--global-batch-size 30 is not a multiple of --batch-size 4 x data-parallel size 4 = 16: set a global batch of"
         " 16 or 32"),
    ],
)  # fmt: skip
def test_batch_sizes_that_do_not_fit(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(SMALL.replace("--batch-size 2", words).split(), {"WORLD_SIZE": "4", "DS_ACCELERATOR": "cpu"})
    assert caught.value.messages == [message]
