"""Start the project's programs as a user does, or in processes that have torch already: real processes, real files."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from support.command_lines import latest
from support.warm import exit_code, launch_ranks, start

TIME_LIMIT = 240
DATA = "--data-path"
"""Of this flag a program takes every value; the tests give it once more to replace the tiny corpus."""
BIN = Path(sys.executable).parent

TINY_MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --num-workers 0 --log-interval 1 --lr 1e-3 --lr-decay-style cosine --min-lr 1e-4 --warmup 0.2"
).split()
"""Small enough for eight processes on two cores, large enough for four stages and four heads."""


@dataclass(frozen=True)
class Finished:
    """How a program ended and what it said."""

    returncode: int
    output: str

    def ok(self) -> "Finished":
        """Itself, if it succeeded."""
        assert self.returncode == 0, self.output[-6000:]
        return self


class Programs:
    """The project's programs in its root folder, with a corpus of made-up words."""

    def __init__(self, root: Path, folder: Path):
        self.root, self.folder = root, folder

    def run(self, *command: str | Path, time_limit: float = TIME_LIMIT, **environ: str) -> Finished:
        """Run ``command`` to its end; its whole process group dies with it."""
        process = self._start(command, environ, stdout=subprocess.PIPE, text=True)
        try:
            output, _ = process.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{command} ran past {time_limit} s:\n{process.communicate()[0][-6000:]}") from None
        return Finished(process.returncode, output)

    @contextmanager
    def started(self, log: Path, *command: str | Path, **environ: str) -> Iterator[subprocess.Popen]:
        """``command`` while it runs, with its output in ``log``; its process group is killed after the block."""
        with open(log, "w") as file:
            process = self._start(command, environ, stdout=file)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self, command: Sequence[str | Path], environ: Mapping[str, str], **options: Any) -> subprocess.Popen:
        return subprocess.Popen(
            latest([str(part) for part in command], only=DATA),
            cwd=self.root,
            env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **environ},
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )

    def python(self, *arguments: str | Path, **options: Any) -> Finished:
        """``python ARGUMENTS``."""
        return self.run(sys.executable, *arguments, **options)

    def torchrun(self, processes: int, *arguments: str | Path, **options: Any) -> Finished:
        """``torchrun`` on a free port."""
        return self.run(
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes),
            *arguments, **options,
        )  # fmt: skip

    def pretrain(self, processes: int, *arguments: str | Path, **options: Any) -> Finished:
        """``pretrain_gpt2.py`` with the tiny model and corpus, on that many ranks that have torch already."""
        return self.warm(processes, "pretrain_gpt2.py", *TINY_MODEL, *self.data_arguments, *arguments, **options)

    def faulty(self, processes: int, fault: str, *arguments: str | Path) -> Finished:
        """The same with a fault planted in it, see ``support/faulty_pretrain.py``."""
        words = ("tests/support/faulty_pretrain.py", *TINY_MODEL, *self.data_arguments, *arguments)
        return self.warm(processes, *words, FAULT=fault)

    def warm(self, processes: int, *command: str | Path, time_limit: float = TIME_LIMIT, **environ: str) -> Finished:
        """``python COMMAND`` on that many ranks that have torch already; the exit code of the first that failed."""
        with tempfile.NamedTemporaryFile() as log:
            place = (
                latest([str(part) for part in command], only=DATA),
                {**os.environ, **environ},
                self.root,
                Path(log.name),
            )
            process = start(*place) if processes == 1 else launch_ranks(processes, *place)
            code = exit_code([process], time_limit)
            output = Path(log.name).read_text()
        assert code is not None, f"{command} ran past {time_limit} s:\n{output[-6000:]}"
        return Finished(code, output)

    @cached_property
    def data_arguments(self) -> list[str]:
        """Flags that name the tiny corpus and its vocabulary."""
        words = [f"w{n}" for n in range(90)]
        vocabulary = {token: n for n, token in enumerate([*words, "<unk>", "<|endoftext|>"])}
        (self.folder / "vocab.json").write_text(json.dumps(vocabulary))
        chance = random.Random(1)
        with open(self.folder / "corpus.jsonl", "w") as file:
            for _ in range(200):
                text = " ".join(chance.choices(words, weights=range(1, 91), k=chance.randint(5, 60)))
                file.write(json.dumps({"text": text}) + "\n")
        self.warm(
            1, "tools/preprocess_data.py", "--input", self.folder / "corpus.jsonl", "--tokenizer-type",
            "WhitespaceTokenizer", "--vocab-file", self.folder / "vocab.json", "--append-eod",
            "--output-prefix", self.folder / "tiny",
        ).ok()  # fmt: skip
        return [
            "--data-path", str(self.folder / "tiny_text_document"), "--vocab-file", str(self.folder / "vocab.json"),
            "--tokenizer-type", "WhitespaceTokenizer", "--split", "8,1,1",
        ]  # fmt: skip

    @cached_property
    def sentence_arguments(self) -> list[str]:
        """Flags that name a tiny corpus of sentences and its vocabulary, for BERT."""
        words = [a + b for a in ("ba", "de", "fi", "gol") for b in ("ka", "le", "mi", "nu", "rop")]
        pieces = [word for word in words] + [f"##{ending}" for ending in ("s", "ing", "ed")]
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *pieces]
        (self.folder / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary))
        chance = random.Random(2)
        endings = ("", "", "s", "ing", "ed")
        with open(self.folder / "sentences.jsonl", "w") as file:
            for _ in range(150):
                sentences = [
                    " ".join(
                        word + chance.choice(endings)
                        for word in chance.choices(words, weights=range(1, 21), k=chance.randint(2, 8))
                    ).capitalize()
                    for _ in range(chance.randint(1, 9))
                ]
                file.write(json.dumps({"text": ". ".join(sentences) + "."}) + "\n")
        kind = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(self.folder / "vocab.txt")]
        self.warm(
            1, "tools/preprocess_data.py", "--input", self.folder / "sentences.jsonl", *kind, "--split-sentences",
            "--output-prefix", self.folder / "sentences",
        ).ok()  # fmt: skip
        return ["--data-path", str(self.folder / "sentences_text_sentence"), *kind, "--split", "8,1,1"]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
