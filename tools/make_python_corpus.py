"""Make an English corpus from the documentation that every Python installation contains.

One document for each help topic of pydoc, and one for each module of the standard library with its docstrings. The
modules are read, not imported. Writes JSONL, one {"text": ...} per line, in an order that is shuffled, but the same in
each run.
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
from megatron.tools.command_line import ToolParser, output_file, run_tool

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages"}
SHUFFLE_SEED = 1234
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


def main() -> None:
    """Read the flags, collect, write."""
    parser = ToolParser(__doc__)
    parser.add_argument("--output", type=output_file, required=True, metavar="FILE", help="corpus to write (.jsonl)")
    parser.add_argument(
        "--max-megabytes", type=float, default=float("inf"), metavar="X", help="stop before the file grows beyond this"
    )
    args = parser.parse_args()
    if not args.max_megabytes > 0:
        raise ConfigError(f"--max-megabytes {args.max_megabytes} must be above 0")
    documents, written = 0, 0
    with atomic_file(args.output, "--output") as file:
        for text in texts():
            line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
            if written + len(line.encode()) > args.max_megabytes * 1e6:
                break
            file.write(line)
            documents, written = documents + 1, written + len(line.encode())
        if not documents:
            raise DataError(
                f"--max-megabytes {args.max_megabytes} has no room for a document, or {STANDARD_LIBRARY} no docstrings"
            )
    print(f"{args.output}: {counted(documents, 'document')}, {written / 1e6:.2f} MB")


def texts() -> Iterator[str]:
    """The documents, shuffled so that the splits of a data set look alike; without empty ones and repetitions."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        print("This Python has no pydoc topics; the corpus only has docstrings.", file=sys.stderr)
        topics = {}
    paths = sorted(path.relative_to(STANDARD_LIBRARY) for path in STANDARD_LIBRARY.rglob("*.py"))
    sources: list[Callable[[], str]] = [partial(str.strip, topics[name]) for name in sorted(topics)]
    sources += [partial(module_text, path) for path in paths if not SKIPPED_FOLDERS.intersection(path.parts)]
    random.Random(SHUFFLE_SEED).shuffle(sources)
    seen = {""}
    for source in sources:
        if (text := source()) not in seen:
            seen.add(text)
            yield text


def module_text(path: Path) -> str:
    """The docstrings of a module of the standard library, each under the name of what it describes.

    Empty if the module has none, or cannot be parsed, like templates and samples.
    """
    try:
        with tokenize.open(STANDARD_LIBRARY / path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in old modules
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError, OSError):
        return ""
    return "\n\n".join(docstrings(tree, ".".join(path.with_suffix("").parts).removesuffix(".__init__")))


def docstrings(node: ast.AST, name: str) -> Iterator[str]:
    """Title and docstring of a module, class or function, and of all that it contains, in the order of the source."""
    if text := ast.get_docstring(node):
        title = f"class {name}" if isinstance(node, ast.ClassDef) else name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            title = f"{name}({ast.unparse(node.args)})"
        yield f"{title}\n\n{text.strip()}"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from docstrings(child, f"{name}.{child.name}")


if __name__ == "__main__":
    run_tool(main)
