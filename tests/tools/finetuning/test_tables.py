"""The tables of a task: the files of GLUE, one's own, and wrong ones; and what becomes of a row."""

import os
from pathlib import Path

import pytest
from support.programs import Programs

from megatron.common.errors import ConfigError, DataError, UserError
from megatron.tools.finetuning.request import TaskRun, build_parser, read_task
from megatron.tools.finetuning.tables import GLUE, read_table

PUBLISHED = {
    "COLA": ("gj04\t1\t\tOne more\n", ("One more",), "1"),
    "MNLI": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
        "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
        "0\t3\t3n\tfiction\t( a )\t( b )\t(R a)\t(R b)\tIt rains\tIt is wet\tneutral\tentailment\n",
        ("It rains", "It is wet"),
        "entailment",
    ),
    "MRPC": (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tHe said "no\tHe refused\n',
        ('He said "no', "He refused"),
        "1",
    ),
    "QNLI": ("index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tnot_entailment\r\n", ("Who?", "He."), "not_entailment"),
    "QQP": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n5\t1\t2\tbroken\n6\t1\t2\tWhy?\tHow?\t0\n",
        ("Why?", "How?"),
        "0",
    ),
    "SST-2": ("sentence\tlabel\na fine film\t1\n\n", ("a fine film",), "1"),
}
"""A file of each shape, with its only good row."""


@pytest.mark.parametrize("task", PUBLISHED)
def test_a_published_file_is_read(tmp_path: Path, task: str) -> None:
    text, texts, label = PUBLISHED[task]
    (tmp_path / "train.tsv").write_text(text, encoding="utf-8")
    table = read_table(tmp_path / "train.tsv", GLUE[task])
    assert [(row.texts, row.label) for row in table.rows] == [(texts, label)]
    assert table.skipped == (task == "QQP")
    table.check_labels(GLUE[task].labels)


@pytest.fixture(scope="module")
def settings(programs: Programs) -> list[str]:
    """Flags of a tiny model, with BERT's vocabulary of the tests."""
    sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 12 --lr 1e-3 --batch-size 2"
    return [*sizes.split(), *programs.sentence_arguments[2:6]]


def read(words: list[str]) -> TaskRun:
    args, rest = build_parser("").parse_known_args(words)
    return read_task(args, rest, {**os.environ, "WORLD_SIZE": "1"})


GOOD = b"sentence\tlabel\nbaka\t1\nfile\t0\nfile mi\t0\n"


@pytest.mark.parametrize(
    ("flags", "content", "error", "message"),
    [
        ("--task SST-2", b"", DataError, "{table}: the file is empty"),
        ("--task SST-2", b"sentence\tlabel\na\t1\nb\n", DataError, "{table}:3: 1 column, where the header has 2"),
        ("--task SST-2", b"sentence\tlabel\na\t1\nb\tgood\n", DataError, "{table}:3: the label 'good' is unknown"),
        ("--task SST-2", b"label\tsentence\tlabel\n0\ta\t1\n", DataError, "{table}:1: 2 columns are named label"),
        ("--task SST-2", b"sentence\tlabel\na\t1\n\xff\t0\n", DataError, "{table}:3: not UTF-8"),
        ("--task RTE", GOOD, DataError, "{table}:1: there is no column sentence1: did you mean sentence?"),
        ("--task TSV", b"sentence\tlabel\na\t1\n", DataError, "{table}: all rows have the label 1"),
        (
            "--task TSV",
            b"label\tsentence\n1\ta\n0\tb\n",
            DataError,
            "{table}:1: the text and the label are one column, 1",
        ),
        ("--task SST-3", GOOD, ConfigError, "--task SST-3 is unknown: choose from COLA, MNLI"),
        ("--task SST-2 --train-iters 5", GOOD, ConfigError, "--epochs 2 and --train-iters 5 exclude each other"),
    ],
)
def test_a_wrong_task_is_refused(settings, tmp_path, flags, content, error, message) -> None:
    table = tmp_path / "train.tsv"
    table.write_bytes(content)
    with pytest.raises(UserError) as raised:
        read([*flags.split(), "--epochs", "2", "--train-data", str(table), *settings])
    assert type(raised.value) is error
    assert raised.value.messages[0].startswith(message.format(table=table))


def test_megatrons_command_line_is_read(settings, tmp_path) -> None:
    """That of its examples/finetune_mnli_distributed.sh, but for the paths and --fp16."""
    table = tmp_path / "train.tsv"
    table.write_text("sentence1\tsentence2\tgold_label\nbaka\tmi\tneutral\nfile\tnu\tentailment\n")
    line = (
        f"--task MNLI --seed 1234 --train-data {table} --valid-data {table} {table} --epochs 5"
        " --tensor-model-parallel-size 1 --num-layers 24 --hidden-size 1024 --num-attention-heads 16"
        " --micro-batch-size 2 --checkpoint-activations --lr 5.0e-5 --lr-decay-style linear --lr-warmup-fraction 0.065"
        " --seq-length 512 --max-position-embeddings 512 --save-interval 500000 --save checkpoint --log-interval 10"
        " --eval-interval 100 --eval-iters 50 --weight-decay 1.0e-1"
    )
    task = read([*line.split(), *settings[-4:]])
    assert task.run.train.train_iters == 5 and len(task.validation) == 2 and not task.warnings
    assert task.run.model.classes == ("contradiction", "entailment", "neutral")


def test_a_table_of_ones_own(settings, tmp_path) -> None:
    """Columns by number or name; classes from the labels; epochs of whole batches, or of all rows."""
    table = tmp_path / "mine.tsv"
    table.write_text("10\tbaka\tx\tmi\n9\tfile\tx\tnu\n10\tgolka\tx\tde\n")
    columns = "--no-header --text-columns 2 4 --label-column 1"
    words = ["--task", "tsv", *columns.split(), "--epochs", "3", "--train-data", str(table), *settings]
    task = read(words)
    assert task.run.model.classes == ("9", "10"), "numbers in their order"
    assert [row.texts for row in task.training[0].rows] == [("baka", "mi"), ("file", "nu"), ("golka", "de")]
    assert (task.iterations_per_epoch, task.run.train.train_iters) == (1, 3)
    assert read([*words, "--keep-last"]).iterations_per_epoch == 2


def test_a_row_becomes_a_sample(settings, tmp_path) -> None:
    """[CLS] a [SEP] b [SEP] [PAD]: the longer text is cut at its end; an empty sample has no label."""
    from megatron.tools.finetuning.finetune import RowStream, TokenizedRows, _tokenized

    table = tmp_path / "pairs.tsv"
    table.write_text("a\tb\tlabel\nbaka bale\tmi\tx\n" + "baka " * 9 + "\t" + "mi " * 3 + "\ty\n")
    words = ["--task", "TSV", "--text-columns", "a", "b", "--epochs", "1", "--train-data", str(table), *settings]
    task = read(words)
    rows: TokenizedRows = _tokenized(task.training, task.run)
    pad, cls, sep = 0, 2, 3
    sample = rows.samples([0])[0]
    assert sample[0] == 0 and (sample[1], sample[7]) == (cls, pad)
    assert [place for place in range(12) if sample[1 + place] == sep] == [3, 5]
    assert list(sample[13:]) == [0] * 4 + [1] * 2 + [-1] * 6
    tokens, types = rows.samples([1])[0][1:13], rows.samples([1])[0][13:]
    assert (tokens != pad).all() and list(types) == [0] * 8 + [1] * 4, "12 = [CLS] 6 [SEP] 3 [SEP]"
    stream = RowStream(rows, range(2), per_epoch=4, samples=8, seed=1)
    labels = stream.take(range(8))[:, 0]
    assert sorted(labels[:4]) == sorted(labels[4:]) == [-1, -1, 0, 1]
