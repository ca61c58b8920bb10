"""Vega, Vega-Lite and Vega-Embed as one script, from a package that carries them: nothing is fetched."""

from __future__ import annotations

import functools
import json
from typing import Any

from registry.errors import RegistryError

EXTRA = "kernel-registry[report]"


class NoCharts(RegistryError):
    """The package that draws is not installed."""


def _converter() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise NoCharts(f"charts need vl-convert-python, which is not installed: pip install '{EXTRA}'") from error
    return vl_convert


@functools.cache
def script() -> str:
    """JavaScript that gives a page `vegaEmbed`."""
    text: str = _converter().javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return text.replace("</script", "<\\/script")


def svg(spec: dict[str, Any], rows: dict[str, list[dict[str, Any]]]) -> str:
    """A chart drawn without a browser, for pages of documentation."""
    text: str = _converter().vegalite_to_svg(_filled(spec, rows))
    return text


def png(spec: dict[str, Any], rows: dict[str, list[dict[str, Any]]]) -> bytes:
    """The same as pixels: smaller where there are thousands of points."""
    data: bytes = _converter().vegalite_to_png(_filled(spec, rows), scale=1.6)
    return data


def _filled(spec: dict[str, Any], rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {**json.loads(json.dumps(spec)), "datasets": rows}
