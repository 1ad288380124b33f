"""The HTML page of studies and training runs: one file that opens from a disk, and its charts and tables beside it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from lamina.errors import ConfigError, DataError, MissingExtraError, StoreError
from lamina.recipes.report_file import REPORT
from lamina.report.page_charts import layout_of, spec_of, theme
from lamina.report.run_report import labelled
from lamina.report.run_section import run_section
from lamina.report.study_section import study_section
from lamina.store.files import read_json, settle, staged
from lamina.studies.study import STUDY, Study, library_versions
from lamina.utils import is_dir, is_file, pluralize, write_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lamina.report.page_charts import Drawing
    from lamina.report.sections import Section

MARK = "lamina_page.json"  # in the folder beside a page, with the names of its files
PIXELS = 2  # of a PNG for each unit of the drawing
WIDE, PANEL = 640, 280  # of a chart in a file, and of one of its panels
FULL = 16  # columns of a heat map from which it takes the whole width of the page
_NO_NAME = re.compile(r"[^a-z0-9]+")


@final
@dataclass(frozen=True)
class Page:
    """A page that was written.

    Attributes:
        path: Of the page.
        files: Charts and tables that were written beside it.
        runs: What the runs are called on the page.
        charts: How many there are.
    """

    path: Path
    files: list[Path]
    runs: list[str]
    charts: int


def write_page(
    runs: str | Path | Iterable[str | Path], path: str | Path, *, title: str = "Lamina report", as_files: bool = False
) -> Page:
    """Write one HTML page about studies and training runs, which needs no network and nothing beside it.

    Charts of one kind from several runs stand side by side, on one scale.

    Args:
        runs: One or more folders of `Study.save`, `lamina study` or `lamina train`.
        path: Of the page; ends in `.html`. Its charts can be saved from it as PNG and SVG, its tables as CSV, Markdown
            and LaTeX.
        title: Written above.
        as_files: Write all of these beside it too: those of "page.html" into the folder "page_files".

    Returns:
        What was written.

    Raises:
        ConfigError: If the path does not end in `.html`, or a folder is given twice or none.
        StoreError: If a folder holds neither a study nor a finished run, one that is damaged or of another version, or
            the page cannot be written.
        DataError: If a study's table is empty, or no run has anything that can be drawn.
        MissingExtraError: If the packages of `lamina[report]` are not installed.
    """
    runs = [runs] if isinstance(runs, str | Path) else runs
    path, folders = Path(path), [Path(run) for run in runs]
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"report: the page is '{path.name}'; its name must end in .html.")
    _check_packages()
    sections = [_section(folder, label) for label, folder in labelled(folders).items()]
    charts = _charts(sections)
    if not charts:
        raise DataError(f"report: {', '.join(map(str, folders))}: there is no figure that can be drawn.")
    html = _rendered(title, sections, charts)
    written = _write_files(path, sections, charts) if as_files else []
    write_text(path, html)
    return Page(path, written, [section.label for section in sections], len(charts))


def _check_packages() -> None:
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise MissingExtraError.of(error, op="report", extra="report") from error


def _section(folder: Path, label: str) -> Section:
    if not is_dir(folder):
        raise StoreError(f"report: there is no folder {folder}.")
    settle(folder)
    if is_file(folder / STUDY):
        study = Study.load(folder)
        if study.table.empty:
            raise DataError(f"report: the study in {folder} has an empty table. Run it again.")
        return study_section(study, label)
    if is_file(folder / REPORT):
        return run_section(folder, label)
    held = "is empty" if not any(folder.iterdir()) else f"holds neither {STUDY} nor {REPORT}"
    raise StoreError(f"report: {folder} {held}: it is of no study or run, or of one that has not ended.")


@final
@dataclass(frozen=True)
class _Chart:
    """A chart on the page, and where it stands."""

    section: Section
    name: str
    drawing: Drawing
    spec: dict[str, Any]
    number: int

    @property
    def layout(self) -> dict[str, int]:
        return layout_of(self.drawing)

    @property
    def wide(self) -> bool:
        return self.layout.get("columns", 0) >= FULL or self.layout["panels"] > 1

    @property
    def file(self) -> str:
        return _file_name(self.number, self.section.label, self.name)


def _charts(sections: Sequence[Section]) -> list[_Chart]:
    """All charts, kind by kind and name by name; those that stand side by side share a scale."""
    places: dict[tuple[str, str], list[tuple[Section, Drawing]]] = {}
    for kind in dict.fromkeys(section.kind for section in sections):
        for section in (section for section in sections if section.kind == kind):
            for name, drawing in section.drawings.items():
                places.setdefault((kind, name), []).append((section, drawing))
    charts: list[_Chart] = []
    for (_, name), own in places.items():
        domain = _ends([drawing for _, drawing in own]) if len(own) > 1 else None
        charts += [
            _Chart(section, name, drawing, spec_of(drawing, domain), len(charts) + number)
            for number, (section, drawing) in enumerate(own, start=1)
        ]
    return charts


def _ends(drawings: Sequence[Drawing]) -> tuple[float, float]:
    values = [row[key] for one in drawings for row in one.rows for key in ("low", "value", "high") if key in row]
    return min(values), max(values)


def _rendered(title: str, sections: Sequence[Section], charts: Sequence[_Chart]) -> str:
    import vl_convert
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    templates = files("lamina.report") / "templates"
    read = {name: (templates / name).read_text(encoding="utf-8") for name in ("page.html.j2", "page.css", "page.js")}
    scripts = {"early": (templates / "theme.js").read_text(encoding="utf-8"), "own": read["page.js"]}
    bundle: Any = vl_convert.javascript_bundle  # whose type asks for a snippet; with one it is bundled anew, in seconds
    scripts["vega"] = bundle()
    tables = [(section, table) for section in sections for table in section.tables]
    data = {
        "charts": [{"spec": chart.spec, "layout": chart.layout, "file": chart.file} for chart in charts],
        "tables": [{**table.compact(), "file": _file_name(0, own.label, table.title)} for own, table in tables],
        "themes": {"light": theme(dark=False), "dark": theme(dark=True)},
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["counted"] = pluralize
    environment.filters["combined"] = lambda first, second: {**first, **second}
    return environment.from_string(read["page.html.j2"]).render(
        title=title,
        sections=sections,
        kinds=list(dict.fromkeys(chart.section.kind for chart in charts)),
        charts=charts,
        tables=tables,
        version=library_versions()["lamina"],
        css=Markup(read["page.css"]),
        scripts={name: Markup(text) for name, text in scripts.items()},
        hashes=" ".join(f"'sha256-{_digest(text)}'" for text in scripts.values()),
        data=Markup(_embedded(data)),
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file_name(number: int, *parts: str) -> str:
    words = "-".join(filter(None, (_NO_NAME.sub("-", part.lower()).strip("-")[:60] for part in parts)))
    return f"{number:02d}-{words}" if number else words or "run"


def _write_files(path: Path, sections: Sequence[Section], charts: Sequence[_Chart]) -> list[Path]:
    """Every chart and table as files in a folder beside the page, all at once or none."""
    beside = path.with_name(f"{path.stem}_files")
    old = read_json(beside / MARK).get("files") if is_file(beside / MARK) else None
    with staged(beside, [MARK], map(str, old) if isinstance(old, list) else ()) as stage:
        names = [*_write_charts(charts, stage), *_write_tables(sections, stage)]
        write_text(stage / MARK, json.dumps({"page": path.name, "files": names}, indent=1))
    return [beside / name for name in names]


def _write_charts(charts: Sequence[_Chart], folder: Path) -> list[str]:
    import vl_convert

    names = []
    for chart in charts:
        said = " · ".join(filter(None, (chart.section.label, chart.drawing.remark)))
        spec = {**chart.spec, "title": {"text": chart.drawing.title, "subtitle": said}}
        if not chart.layout["panels"]:
            narrow = chart.layout.get("columns", 0) * chart.layout.get("step", 0) > WIDE
            spec["width"] = {"step": chart.layout["step"]} if narrow else WIDE
        svg = vl_convert.vegalite_to_svg(spec, config={**theme(dark=False), "font": "Helvetica, Arial, sans-serif"})
        write_text(folder / f"{chart.file}.svg", svg)
        (folder / f"{chart.file}.png").write_bytes(vl_convert.svg_to_png(svg, scale=PIXELS))
        names += [f"{chart.file}.svg", f"{chart.file}.png"]
    return names


def _write_tables(sections: Sequence[Section], folder: Path) -> list[str]:
    names = []
    tables = [(section, table) for section in sections for table in section.tables]
    for number, (section, table) in enumerate(tables, start=1):
        name = f"table-{_file_name(number, section.label, table.title)}"
        write_text(folder / f"{name}.md", table.markdown())
        write_text(folder / f"{name}.tex", table.latex())
        names += [f"{name}.md", f"{name}.tex"]
    return names
