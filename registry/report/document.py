"""One HTML file that needs no network: styles, the library that draws, data and script inside of it."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from registry.report import library

HERE = Path(__file__).parent
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
"""What the browser holds the page to: it can reach nothing. Vega compiles its expressions, hence the eval."""


def document(title: str, data: Mapping[str, Any], script: str) -> str:
    """A page whose script, a file beside this one, makes its sections from the data."""
    style, common, own = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "common.js", script))
    data_text = json.dumps(data, separators=(",", ":"), default=str, allow_nan=False).encode()
    packed = base64.b64encode(gzip.compress(data_text, 9, mtime=0)).decode()  # a fifth of it, and no text of a tag
    parts = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{html.escape(title)}</title>",
        f"<style>\n{style}</style>\n</head>\n<body>",
        '<a class="skip" href="#main">To the figures</a>',
        f'<header><h1>{html.escape(title)}</h1><p id="about"></p>',
        '<nav id="contents" aria-label="Sections"></nav></header>',
        '<main id="main" tabindex="-1"></main><footer id="foot"></footer>',
        '<dialog id="cell" aria-labelledby="cell-title"></dialog>',
        "<noscript><p>This page draws its figures by script.</p></noscript>",
        f'<script type="text/plain" id="data">{packed}</script>',
        f"<script>(() => {{\n{library.script()}\n}})();</script>",
        f"<script>\n(async () => {{\n{common}{own}}})();\n</script>\n</body>\n</html>\n",
    )
    return "\n".join(parts)
