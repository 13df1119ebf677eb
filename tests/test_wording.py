"""Documents, help texts, docstrings and messages use the terms of Megatron-LM, DeepSpeed and PyTorch.

Each entry of ``WORDING`` is a pattern that newcomers stumble over, and what to write instead. A failure prints
``file:line: what is there -> what to write``. Exceptions are in ``ALLOWED``.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORDING = {
    r"(?<!is )(?<!are )(?<!left )(?<!leaves )(?<!leave )(?<!nothing )\bbehind\b": "after, following",
    r"\bgo(?:es|ne)? on\b(?! (?:GPU|CPU))|\bwent on\b|\bgoing on\b": "continues, resumes",
    r"\bas long as it likes\b": "without a limit",
    r"\bwhereabouts\b": "progress state, position",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\b(?:comes|come|came|coming) to (?:a |an |the )?(?:number|total|\d|new checkpoints|there\b)": "totals, is",
    r"\bstands? in for\b|\bone stands in\b|\bstand-in\b": "replaces, falls back to",
    r"\b(?:is|are|was|be|been) told\b|\btold (?:by|the|what)\b|\btells?\b": "reports, is given",
    r"\bhas no word of\b|\bin words\b|\bword for it\b|\bown words\b": "does not report; as text",
    r"\blast straw\b": "limit reached",
    r"\bmeans? of means\b": "average of per-micro-batch means",
    r"\bledger\b": "sample history",
    r"\bdepartures?\b": "exit",
    r"\bleav(?:e|es|ing) with (?:code|exit|\d)": "exits with",
    r"\bdeaths?\b": "rank failure",
    r"\bverdicts?\b": "result",
    r"\bculprits?\b": "the rank, the cause",
    r"\broll call\b|\bcall_roll\b": "rendezvous barrier",
    r"\bgoes no further\b": "hangs",
    r"\bobeys?\b": "interprets, executes",
    r"\blooks? closer\b|\bcloser looks?\b|\blet be\b": "callback, profiling; not interrupted",
    r"(?<!`)\blisteners?\b|\bheard\b": "instruction hook",
    r"\bspeaks\b": "logs, prints",
    r"\bnobody\b|\bsomebody\b": "no process, no rank; another user",
    r"\bwhat (?:it|they|he|a \w+|the \w+) (?:is|are|was|were) made of\b": "configuration, composition",
    r"\bwhat one sees\b|\bone sees\b": "output; is visible; how to check",
    r"\bthe same code\b": "not tested",
    r"\bhouse rules?\b|\bfloors\b": "code style, layers",
    r"\bknobs?\b": "setting",
    r"\bstretch(?:es)?\b": "segment",
    r"\bevaluates never\b": "never evaluates",
    r"\bfor ever\b": "forever",
    r"\bprocessor time\b": "CPU time",
    r"\blikeliest\b": "most likely",
    r"\bfp32 masters\b": "fp32 master weights",
    r"\bneighbour|\bbehaviour|\bcolour|\brecognis|\binitialis|\bserialis|\bfavour": "American spelling",
    r"\bcontigious\b": "contiguous (contigious only as an alias of the flag)",
}
"""Pattern, ignoring case -> the usual words."""

ALLOWED = (
    r"^behind$|per rank behind|processes behind",  # of a clock; left behind
    r"[-_]contigious[-_]|contigious_|contigious-checkpointing",  # the flag's classic spelling
    r'"ledger"|^(?:ledger|stretches)$|`ledger`|\bledger\b.*\brun\.json\b',  # a key of run.json
)
"""What a line may contain none the less: it is removed before the patterns are applied."""

DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "mkdocs.yml", "hostfile.example", "run_tests.sh", "pyproject.toml"),
    *("requirements.txt", "requirements-docs.txt", "requirements-test.txt", "tools/environment.sh"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    *sorted(
        f"{path.parent.name}/{path.name}"
        for folder in ("examples", "docker")
        for path in (ROOT / folder).iterdir()
        if path.is_file()
    ),
]
PROGRAMS = [
    *("pretrain_gpt2.py", "pretrain_bert.py", "pretrain_t5.py", "benchmarks/run.py", "benchmarks/write_figures.py"),
    "benchmarks/gpu/command.py",
    *sorted(f"tools/{path.name}" for path in (ROOT / "tools").glob("[a-z]*.py")),
]
CODE = [
    *("pretrain_gpt2.py", "pretrain_bert.py", "pretrain_t5.py"),
    *sorted(
        str(path.relative_to(ROOT))
        for folder in ("megatron", "tools", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if path != Path(__file__)
    ),
]


def findings(name: str, lines: Iterator[tuple[int, str]]) -> list[str]:
    """``name:line: found -> suggestion`` for each unclear word of numbered lines."""
    found = []
    for number, line in lines:
        for allowed in ALLOWED:
            line = re.sub(allowed, "", line)
        for pattern, better in WORDING.items():
            found += [
                f"{name}:{number}: {match[0]!r} -> {better}" for match in re.finditer(pattern, line, re.IGNORECASE)
            ]
    return found


def strings_and_comments(source: str) -> Iterator[tuple[int, str]]:
    """The text of a module that people read, by line: docstrings, string literals, comments, names of functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from enumerate(node.value.splitlines(), node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name.replace("_", " ")
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?:^|\s)# (.*)", line):
            yield number, comment[1]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_use_plain_terms(name) -> None:
    found = findings(name, enumerate((ROOT / name).read_text().splitlines(), 1))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_texts_use_plain_terms(name) -> None:
    from support.pages import help_of  # not earlier: this file is a program, too

    text = help_of(name)
    found = findings(f"{name} --help", enumerate(text.splitlines(), 1))
    assert text and not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("name", CODE)
def test_code_uses_plain_terms(name) -> None:
    found = findings(name, strings_and_comments((ROOT / name).read_text()))
    assert not found, "\n" + "\n".join(sorted(set(found)))


if __name__ == "__main__":  # python tests/test_wording.py: all findings in code, with the number of each file
    for name in CODE:
        found = sorted(set(findings(name, strings_and_comments((ROOT / name).read_text()))))
        print(*found, sep="\n", end="\n" if found else "")
