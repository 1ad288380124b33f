"""Charts as files: drawings of this package as PNG, SVG or HTML, and the checks before one is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lamina.errors import ConfigError, DataError
from lamina.report.charts import layout_of, spec_of, theme
from lamina.utils import atomic_write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.report.charts import Drawing, Rows, Spec

FORMATS = (".png", ".svg", ".html")
PIXELS = 2  # PNG pixels for each unit of the drawing, so that it stays sharp on fine screens
WIDE = 640  # width of a chart without panels, in pixels


def checked_path(op: str, path: Path | str, rows: Rows, keys: tuple[str, ...]) -> Path:
    """Return `path` as a Path, after checking that a chart of the rows can be drawn into this file.

    Raises ConfigError if the path has a different suffix than `.png`, `.svg` and `.html`; DataError if there are no
    rows, or one lacks one of the `keys`. Messages begin with `op`.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{op}: the path ends in '{path.suffix}'; known: {', '.join(FORMATS)}.")
    if not rows:
        raise DataError(f"{op}: there are no rows to draw.")
    for i, row in enumerate(rows):
        for key in keys:
            if key not in row:
                has = ", ".join(map(str, row)) or "nothing"
                raise DataError(f"{op}: row {i} has no '{key}'; it has {has}.", row=i, column=key)
    return path


def save_drawing(drawing: Drawing, path: Path, below: Sequence[str] = ()) -> Path:
    """Write a chart to a file in the format of its suffix (.html, .svg; any other: PNG), and return the path.

    An existing file is replaced. `below` are lines of small text below the title. Raises MissingExtraError if the
    packages of `lamina[report]` are not installed, and StoreError if writing fails.
    """
    return save_chart(sized(spec_of(drawing), drawing), path, drawing.title, below)


def sized(spec: Spec, drawing: Drawing) -> Spec:
    """Return `spec`, the specification of a drawing, with the width that the chart has in a file.

    It is 640 pixels, or more if the columns of a heat map need more. A chart with panels has its width already, and is
    returned unchanged.
    """
    layout = layout_of(drawing)
    if layout["panels"]:
        return spec
    is_wide = layout.get("columns", 0) * layout.get("step", 0) > WIDE
    return {**spec, "width": {"step": layout["step"]} if is_wide else WIDE}


def save_chart(spec: Spec, path: Path, title: str, below: Sequence[str] = ()) -> Path:
    """Write a Vega-Lite specification to a file in the format of its suffix, and return the path.

    Args:
        spec: The specification, with its data.
        path: The file: `.html`, `.svg`, or PNG for any other suffix. An existing file is replaced completely or, if
            writing fails, not at all. Parent folders are created.
        title: Title of the chart.
        below: Lines of small text below the title.

    Raises:
        StoreError: If writing fails.
    """
    import vl_convert

    heading = {"text": title, "offset": 12, "subtitlePadding": 6, **({"subtitle": list(below)} if below else {})}
    spec = {**spec, "title": heading}
    config = {**theme(dark=False), "font": "Helvetica, Arial, sans-serif", "padding": 16}
    with atomic_write(path) as beside:
        if path.suffix.lower() == ".html":
            beside.write_text(vl_convert.vegalite_to_html(spec, bundle=True, config=config), encoding="utf-8")
        elif path.suffix.lower() == ".svg":
            beside.write_text(vl_convert.vegalite_to_svg(spec, config=config), encoding="utf-8")
        else:
            beside.write_bytes(vl_convert.vegalite_to_png(spec, scale=PIXELS, config=config))
    return path
