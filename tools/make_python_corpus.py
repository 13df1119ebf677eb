"""Make an English corpus from the documentation that every Python installation contains.

One document for each help topic of pydoc, and one for each module of the standard library with its
docstrings. The modules are read, not imported. Writes JSONL, one {"text": ...} per line, in an order that
is shuffled, but the same in each run.
"""

import ast
import json
import random
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import _project_root  # noqa: F401
from _atomic_file import atomic_file

from megatron.common.errors import ConfigError, DataError, counted
from megatron.tools.command_line import ToolParser, run_tool

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages"}
SHUFFLE_SEED = 1234

Source = Callable[[], str]
"""Makes a document when it is asked to; an empty one where there is no text."""


def main() -> None:
    """Read the flags, collect, write."""
    parser = ToolParser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="corpus to write (.jsonl)")
    parser.add_argument("--max-megabytes", type=float, metavar="X", help="stop before the file grows beyond this")
    args = parser.parse_args()
    if args.max_megabytes is not None and not args.max_megabytes > 0:
        raise ConfigError(f"--max-megabytes {args.max_megabytes} must be above 0")
    limit = float("inf") if args.max_megabytes is None else args.max_megabytes * 1e6
    # Splits are cut from the order of the documents: in the shuffled one they look alike.
    sources = [*topic_sources(), *module_sources(Path(sysconfig.get_path("stdlib")))]
    random.Random(SHUFFLE_SEED).shuffle(sources)
    documents, written = 0, 0
    with atomic_file(args.output, "--output") as file:
        for line in corpus_lines(sources):
            size = len(line.encode("utf-8"))
            if written + size > limit:
                break
            file.write(line)
            documents, written = documents + 1, written + size
        if not documents:
            raise DataError(no_documents(args.max_megabytes))
    print(f"{args.output}: {counted(documents, 'document')}, {written / 1e6:.2f} MB")


def topic_sources() -> list[Source]:
    """The help topics of pydoc; none, with a word on stderr, where the install left them out."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        print("This Python has no pydoc topics; the corpus is made of docstrings alone.", file=sys.stderr)
        return []
    return [partial(str.strip, topics[name]) for name in sorted(topics)]


def module_sources(root: Path) -> list[Source]:
    """The modules below ``root``, without tests and installed packages."""
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [partial(module_text, root, path) for path in paths if not SKIPPED_FOLDERS.intersection(path.parts)]


def module_text(root: Path, path: Path) -> str:
    """The docstrings of the module at ``root / path``, each under the name of what it describes.

    Empty if the module has none, or is not of this Python's grammar, as templates and samples are.
    """
    try:
        with tokenize.open(root / path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in old modules
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError, OSError):
        return ""
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return "\n\n".join(f"{title}\n\n{text}" for title, text in docstrings(tree, name))


def docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """(title, docstring) of a module, class or function, and of all it holds, in the order of the source."""
    text = ast.get_docstring(node)
    if text:
        yield title_of(node, name), text.strip()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from docstrings(child, f"{name}.{child.name}")


def title_of(node: ast.AST, name: str) -> str:
    """``module``, ``class module.Name`` or ``module.function(arguments)``."""
    if isinstance(node, ast.ClassDef):
        return f"class {name}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"{name}({ast.unparse(node.args)})"
    return name


def corpus_lines(sources: list[Source]) -> Iterator[str]:
    """A line of JSONL for each document, without the empty ones and the repetitions."""
    seen = {""}
    for source in sources:
        text = source()
        if text not in seen:
            seen.add(text)
            yield json.dumps({"text": text}, ensure_ascii=False) + "\n"


def no_documents(max_megabytes: float | None) -> str:
    """Why the corpus is empty."""
    if max_megabytes is None:
        return f"{sysconfig.get_path('stdlib')}: no docstrings; use a Python with the sources of its standard library"
    return f"--max-megabytes {max_megabytes} has no room for a document; give more"


if __name__ == "__main__":
    run_tool(main)
