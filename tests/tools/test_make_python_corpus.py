"""tools/make_python_corpus.py: the help topics and docstrings of this Python, the same in each run."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make(output: Path, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools" / "make_python_corpus.py", "--output", output, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_topics_and_docstrings_without_repetitions(tmp_path: Path):
    output = tmp_path / "corpus.jsonl"
    result = make(output)
    assert result.returncode == 0, result.stderr
    documents = texts(output)
    assert f"{len(documents)} documents, {output.stat().st_size / 1e6:.2f} MB" in result.stdout
    assert output.stat().st_size > 1e6
    assert len(set(documents)) == len(documents)
    from pydoc_data.topics import topics

    assert set(map(str.strip, topics.values())) <= set(documents)
    decoder = next(text for text in documents if text.startswith("json.decoder\n"))
    assert "\n\nclass json.decoder.JSONDecoder\n\nSimple JSON" in decoder
    assert "\n\njson.decoder.JSONDecoder.raw_decode(self, s, idx=0)\n\n" in decoder
    assert not any(text.startswith(("test.", "unittest.test", "idlelib")) for text in documents)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_bad_flags_are_one_line_and_keep_the_old_file(tmp_path: Path):
    output = tmp_path / "corpus.jsonl"
    output.write_text("old")
    for flags, code, expected in [
        (["--max-megabytes", 0], 2, "--max-megabytes 0.0 must be above 0"),
        (["--max-megabytes", "nan"], 2, "--max-megabytes nan must be above 0"),
        (["--max-megabytes", 1e-6], 3, "has no room for a document"),
    ]:
        result = make(output, *flags)
        assert (result.returncode, len(result.stderr.splitlines())) == (code, 1)
        assert expected in result.stderr
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]
