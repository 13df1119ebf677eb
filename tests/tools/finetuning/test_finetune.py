"""Fine-tuning BERT: a task is learned, and from a checkpoint of any layout every layout computes the same."""

import random
from pathlib import Path

import pytest
from support.programs import Programs, read_metrics
from support.training import RankTraining, fine_tune

GOOD, BAD = ("baka", "bale", "bami"), ("golka", "golle", "golmi")
NEUTRAL = ("deka", "dele", "demi", "fika", "file", "fimi", "finu")
RATES = "--lr 2e-3 --lr-decay-style linear --warmup 0.1 --num-attention-heads 4".split()


def sentence(chance: random.Random, words: tuple[str, ...]) -> str:
    """A few neutral words, and one of ``words`` among them."""
    parts = [*chance.choices(NEUTRAL, k=chance.randint(2, 5)), chance.choice(words)]
    chance.shuffle(parts)
    return " ".join(parts)


@pytest.fixture(scope="module")
def pretrained(train_bert_in_ranks: RankTraining, tmp_path_factory) -> Path:
    """A checkpoint of BERT on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("pretrained")
    settings = "--model-parallel-size 2 --train-iters 3 --batch-size 4 --eval-iters 0 --zero-stage 1 --seed 7"
    train_bert_in_ranks(2, *settings.split(), "--save", folder)
    return folder


@pytest.fixture(scope="module")
def reviews(tmp_path_factory) -> list[str]:
    """Tables like SST-2's, of which 64 rows are held out: a word decides."""
    folder, chance = tmp_path_factory.mktemp("reviews"), random.Random(3)
    for name, rows in (("train", 256), ("dev", 64)):
        with open(folder / f"{name}.tsv", "w") as file:
            file.write("sentence\tlabel\n")
            for number in range(rows):
                file.write(f"{sentence(chance, (BAD, GOOD)[number % 2])}\t{number % 2}\n")
    return ["--task", "SST-2", "--train-data", str(folder / "train.tsv"), "--valid-data", str(folder / "dev.tsv")]


def test_a_task_is_learned_resumed_and_evaluated(programs: Programs, pretrained, reviews, tmp_path):
    words = [*reviews, *RATES, "--batch-size", "16", "--log-interval", "16", "--save", tmp_path / "tuned"]
    start = [*words, "--load", tmp_path / "tuned", "--metrics-file", tmp_path / "metrics", "--epochs", "4"]
    first = programs.warm(
        1, "tasks/main.py", *start, "--pretrained-checkpoint", pretrained, "--exit-interval", "32"
    ).ok()
    assert "not in it, and so initialized: 9.classifier.bias, 9.classifier.weight" in first.output
    programs.warm(1, "tasks/main.py", *start).ok()
    lines = read_metrics(tmp_path / "metrics")
    epochs = {line["epoch"]: line["validation_accuracy"] for line in lines if "epoch" in line}
    assert list(epochs) == [1, 2, 3, 4] and epochs[4] > 0.9, epochs
    assert sorted(path.name for path in (tmp_path / "tuned").glob("global_step*")) == [
        f"global_step{number}" for number in (16, 32, 48, 64)
    ]
    only = ("--epochs", "0", "--load", tmp_path / "tuned", "--batch-size", "8")
    (tmp_path / "memory").mkdir()
    snapshots = ("--save", tmp_path / "tuned", "--snapshot-interval", "1", "--snapshot-dir", tmp_path / "memory")
    evaluated = programs.warm(2, "tasks/main.py", *reviews, *only, *snapshots, "--model-parallel-size", "2").ok()
    assert not any((tmp_path / "memory").iterdir())
    assert f"accuracy {epochs[4]:.2%} ({round(64 * epochs[4])} of 64)" in evaluated.output


def test_weights_are_those_of_the_checkpoint(fine_tuned, run_ranks, pretrained, tmp_path):
    """All but the head, after a step that changes next to nothing, on a layout that did not save them."""
    fine_tuned(2, f"--train-iters 1 --lr 1e-12 --zero-stage 3 --save {tmp_path}", epochs="")
    ((before, after),) = run_ranks(1, whole_weights_of, pretrained, tmp_path)
    assert after.keys() - before.keys() == {"9.classifier.weight", "9.classifier.bias"}
    assert before.keys() - after.keys() == {
        f"{layer}.{kind}" for layer in ("9.dense", "9.layernorm", "9.order") for kind in ("weight", "bias")
    } | {"11.word_bias"}
    for name in before.keys() & after.keys():
        assert (before[name] - after[name]).abs().max() < 1e-9, name
    assert before["2.position_embeddings.weight"].std() > 0.01


def whole_weights_of(*folders: Path) -> list[dict]:
    from megatron.checkpoint.tracker import newest
    from megatron.tools.convert.load_and_save import lazy_weights

    return [dict(lazy_weights(newest(folder))) for folder in folders]


LAYOUTS = {
    "tp2-sequence": (2, "--model-parallel-size 2 --sequence-parallel --shape-order SBH"),
    "dp2-zero3": (2, "--zero-stage 3"),
    "pp2-zero1": (2, "--pipe-parallel-size 2 --zero-stage 1"),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> list[str]:
    """Tables like MNLI's, whose rows are no multiple of the batch."""
    folder, chance = tmp_path_factory.mktemp("pairs"), random.Random(4)
    labels = ("entailment", "neutral", "contradiction")
    for name, rows in (("train", 13), ("matched", 9), ("mismatched", 5)):
        with open(folder / f"{name}.tsv", "w") as file:
            file.write("index\tsentence1\tsentence2\tgold_label\n")
            for number in range(rows):
                texts = sentence(chance, GOOD), sentence(chance, BAD)
                file.write("\t".join([str(number), *texts, chance.choice(labels)]) + "\n")
    return [
        *("--task", "MNLI", "--train-data", str(folder / "train.tsv")),
        *("--valid-data", str(folder / "matched.tsv"), str(folder / "mismatched.tsv")),
    ]


@pytest.fixture(scope="module")
def fine_tuned(_rank_pools, pretrained, pairs, tmp_path_factory):
    """``fine_tuned(processes, flags)``: the metrics of a run from the checkpoint, without dropout."""

    def run(processes: int, flags: str, epochs: str = "--epochs 2") -> list[dict]:
        metrics = tmp_path_factory.mktemp("metrics") / "metrics"
        settings = (
            f"{epochs} --keep-last --batch-size 2 --global-batch-size 4 --hidden-dropout 0 --attention-dropout 0"
            " --log-interval 1 --eval-interval 4 --eval-iters 2 --clip-grad 0.5"
        )
        words = [
            *(*pairs, *RATES, *settings.split(), *flags.split()),
            *("--pretrained-checkpoint", str(pretrained), "--metrics-file", str(metrics)),
        ]
        outputs = _rank_pools.run_once(processes, fine_tune, words)
        assert all(code == 0 for code, _ in outputs), outputs
        return read_metrics(metrics)

    return run


@pytest.fixture(scope="module")
def one_process(fine_tuned):
    return fine_tuned(1, "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_with_one_process(fine_tuned, one_process, layout):
    found = fine_tuned(*LAYOUTS[layout])
    assert len(found) == len(one_process) == 8 + 2 + 2  # iterations, validation losses, epochs
    names = {"lm_loss", "grad_norm", "validation_loss", "epoch", "validation_accuracy"}
    for one, other in zip(one_process, found, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() & names | {name for name in one if name.startswith("validation_accuracy/")}:
            assert other[name] == pytest.approx(one[name], rel=1e-4), (layout, one["iteration"], name)
