"""Tools that evaluate, on a rank of this session, without a launcher and its imports."""

import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def evaluate_on_rank(words: list[str], name: str = "evaluate") -> dict[str, Any] | None:
    """What the tool ``name`` prints on this rank for ``words``: figures on the first, nothing on the others."""
    tool = load_tool(name)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        tool.evaluate(tool.build_parser().parse_args(words))
    # DeepSpeed's pipeline writes before it; on a real screen that is kept off by the file descriptor.
    _, brace, rest = output.getvalue().partition("{\n")
    return json.loads(brace + rest) if brace else None


def load_tool(name: str) -> Any:
    """The module of a tool, under a name that no package has."""
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))  # for what the tools share
    if (module := sys.modules.get(f"tool_{name}")) is None:
        spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
        module = sys.modules[f"tool_{name}"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
