"""What the build of the documentation adds to MkDocs: colors of code, and a search index that file:// can load."""

from pathlib import Path
from typing import Any


def on_post_build(config: Any) -> None:
    """Write search/index.js and highlight.css beside the pages."""
    from pygments.formatters import HtmlFormatter

    site = Path(config.site_dir)
    index = (site / "search" / "search_index.json").read_text()
    (site / "search" / "index.js").write_text(f"const searchIndex = {index};\n")
    (site / "highlight.css").write_text(HtmlFormatter(style="default").get_style_defs(".highlight"))
