"""The documentation builds without warnings, and what it names exists: pages, files, commands, flags."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.pages import PAGES, ROOT, help_of

from megatron.cli.classic_flags import OUTCOMES

LAUNCHERS = ("deepspeed", "torchrun", "accelerate")
TRAINING = "pretrain_gpt2.py"
OF_OTHER_PROGRAMS = {
    *("--build-arg", "--file", "--tag", "--detach", "--wait", "--build"),  # docker
    *("--rank", "--launcher_args", "--nodes", "--hostfile", "--mca", "--strict"),  # Slurm, mpirun, mkdocs
    *("--nv", "--container-image", "--signal", "--batch", "--ntasks-per-node"),  # Apptainer, Pyxis, Slurm
    *("--label", "--mpi", "--gpus-per-node"),  # Slurm
    *("--healthy", "--json-out", "--rounds", "--timeout", "--faults"),  # benchmarks and pytest
}
CLASSIC_FLAGS = {f"--{name.partition('=')[0].rstrip('*')}" for name in OUTCOMES}
"""Flags of other suites that the training programs accept, or refuse with a reason."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in strict mode: a broken link, a missing anchor and a page outside the navigation are errors."""
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install -r requirements-docs.txt")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    finished = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    assert finished.returncode == 0, finished.stderr
    notices = [line for line in finished.stderr.splitlines() if line and not line.startswith("INFO ")]
    assert not notices, "\n".join(notices)
    return folder


def test_the_site_needs_no_other_site(site: Path) -> None:
    pages = "".join(page.read_text() for page in site.rglob("*.html"))
    assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://[^"]*', pages) == [], "all assets are local"
    assert "ParallelLayout" in (site / "api.html").read_text()


def test_search_works_without_a_web_server(site: Path) -> None:
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser_path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto((site / "search.html").as_uri() + "?q=pipeline+bubble")
        page.wait_for_selector("#mkdocs-search-results article", timeout=60_000)
        assert "concepts.html#pipeline-bubble" in page.inner_html("#mkdocs-search-results")
        browser.close()


def test_the_version_is_the_same_everywhere() -> None:
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"copyright: Version {version}\n" in (ROOT / "mkdocs.yml").read_text()
    assert f"\n## {version}" in (ROOT / "docs" / "changelog.md").read_text()


def test_python_blocks_compile_and_their_imports_exist() -> None:
    """Each name that a block imports from this repository is there; what a reader's own file has is left out."""
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("megatron", "pretrain")):
                    module = importlib.import_module(node.module or "")
                    missing = [one.name for one in node.names if not hasattr(module, one.name)]
                    assert not missing, f"{page.name}: {node.module} has no {missing}"


def test_diffs_in_pages_fit_the_files() -> None:
    """What a diff of a page keeps or removes stands in the file."""
    for page in PAGES:
        for block in re.findall(r"^```diff\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            (file,) = re.findall(r"^\+\+\+ b/(.*)$", block, re.MULTILINE)
            for hunk in re.split(r"^@@.*@@\n", block, flags=re.MULTILINE)[1:]:
                lines = [line[1:] for line in hunk.splitlines(keepends=True) if line[0] in " -"]
                assert "".join(lines) in (ROOT / file).read_text(), f"{page.name}: {file} has no {lines}"


def test_paths_in_pages_exist() -> None:
    """Every path of this repository that a page names in code style, such as `megatron/mpu/`, also in a command."""
    folders = r"(?:megatron|tools|examples|recipes|tests|docs|ds_configs|docker|benchmarks)/[\w./-]*"
    words = [(page.name, word) for page in PAGES for span in code_spans(page) for word in span.split()]
    paths = [(page, word) for page, word in words if re.fullmatch(folders, word)]
    assert [(page, path) for page, path in paths if not (ROOT / path).exists()] == []


def test_flags_in_pages_exist() -> None:
    """A flag that the text names belongs to some program of this repository, to a launcher or to a known tool."""
    named = {(page.name, flag) for page in PAGES for span in code_spans(page) for flag in _flags(span.split())}
    assert sorted((page, flag) for page, flag in named if flag not in all_flags()) == []


def code_spans(page: Path) -> list[str]:
    """What the text of a page says in code style."""
    return re.findall(r"`([^`\n]+)`", _without_fences(page.read_text()))


def _flags(words: list[str]) -> set[str]:
    found = (re.match(r"--[a-zA-Z][\w-]*", word.strip("()[],.:")) for word in words)
    return {match[0].replace("_", "-") for match in found if match}


def _without_fences(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


@cache
def flags_of(script: str) -> frozenset[str]:
    """The flags that the help of a script lists, those of its subcommands among them; hyphens for underscores."""
    text = help_of(script)
    for command in re.findall(r"^ {4}(?!python )([a-z][\w-]+)(?: |$)", text, re.MULTILINE):
        if "COMMAND" in text.splitlines()[0]:
            text += help_of(script, command)
    return frozenset(flag.replace("_", "-") for flag in re.findall(r"--[a-zA-Z][\w-]*", text))


@cache
def launcher_flags(launcher: str) -> frozenset[str]:
    command = ["launch"] if launcher == "accelerate" else []
    text = help_of(Path(sys.executable).parent / launcher, *command)
    return frozenset(flag.replace("_", "-") for flag in re.findall(r"--[a-zA-Z][\w-]*", text))


@cache
def all_flags() -> frozenset[str]:
    scripts = [TRAINING, "pretrain_bert.py", "pretrain_t5.py", "pretrain_vlm.py", "tasks/main.py", "benchmarks/run.py"]
    scripts += ["benchmarks/write_figures.py"]
    scripts += ["benchmarks/compare.py", "benchmarks/gpu/command.py"]
    scripts += [f"tools/{path.name}" for path in (ROOT / "tools").glob("[a-z]*.py")]
    known = frozenset().union(*(flags_of(script) for script in scripts), *(launcher_flags(name) for name in LAUNCHERS))
    shell = "".join(path.read_text() for path in (ROOT / "examples").iterdir() if path.is_file())
    return known | OF_OTHER_PROGRAMS | CLASSIC_FLAGS | frozenset(re.findall(r"--[a-z][\w-]+", shell))
