"""Write the HTML page about studies and training runs, which needs no server, and its charts and tables as files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, cast, final

from lamina.errors import ConfigError, DataError, StoreError, require_packages
from lamina.recipes.report_file import REPORT, STUDY
from lamina.report.chart_files import PIXELS, save_chart, sized
from lamina.report.charts import layout_of, spec_of, theme, values_of
from lamina.report.run_report import labelled
from lamina.report.sections import run_section
from lamina.report.study_section import study_section
from lamina.store.files import read_json, settle, staged
from lamina.utils import atomic_write, is_dir, is_file, pluralize, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from lamina.report.charts import Drawing, Spec
    from lamina.report.sections import Section

MARK = "lamina_page.json"  # file in the folder beside a page that lists the files of that folder
FULL = 16  # a heat map of at least this many columns gets the whole width of the page
MOST_LEADING = 2  # largest number of charts that stand beside the verdicts, at the top of the page
TITLES = {  # kind of study -> title of a page on which all sections are of this kind
    "probe": "What each layer of {model} knows about {tasks}",
    "importance": "Which layers of {model} its readers use",
    "similarity": "How the layers of {model} differ",
    "errors": "What {model} gets wrong on {tasks}",
    "advise": "How many layers of {model} {tasks} needs",
    "drift": "What training changed in {model}",
    "removal": "What each block of {model} does for {tasks}",
    "training run": "{model} trained on {tasks}",
}
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


@final
@dataclass(frozen=True)
class Page:
    """A page that `write_page` has written.

    Attributes:
        path: The HTML file.
        files: Charts and tables that were written beside it; [] without `as_files`.
        runs: Names of the runs on the page.
        charts: Number of charts on the page.
    """

    path: Path
    files: list[Path]
    runs: list[str]
    charts: int


def write_page(
    runs: str | Path | Iterable[str | Path], path: str | Path, *, title: str | None = None, as_files: bool = False
) -> Page:
    """Write one HTML page about studies and training runs; it needs no network and no other file.

    The page begins with a verdict per task and the most important chart. If several runs have the same chart, the
    charts stand side by side and share a scale. In the page, a reader can save charts as PNG and SVG, and tables as
    CSV, Markdown and LaTeX.

    Args:
        runs: One or more folders that `Study.save`, `lamina study` or `lamina train` wrote.
        path: File to write; ends in `.html` or `.htm`. An existing file is replaced, except after errors.
        title: Title of the page. None: what was studied, with the names of the model and the tasks.
        as_files: Whether to write each chart (PNG and SVG) and table (Markdown and LaTeX) as a file too. For the page
            "page.html" they are in the folder "page_files". False: such an older folder stays unchanged.

    Returns:
        The path of the page, the files beside it, the names of the runs and the number of charts.

    Raises:
        ConfigError: If the path ends in neither `.html` nor `.htm`, no folder is given, a folder is given twice, or a
            heat map of a study has no `y`.
        StoreError: If a folder holds neither a study nor a finished run, if its files are damaged or come from another
            version, or if the page or its folder of files cannot be written.
        DataError: If a study's table is empty, or no run has anything that can be drawn.
        MissingExtraError: If the packages of `lamina[report]` are not installed.
        UnknownNameError: If a figure of a study has an unknown kind, or its table lacks a column that the figure names.
    """
    runs = [runs] if isinstance(runs, str | Path) else runs
    path, folders = Path(path), [Path(run) for run in runs]
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"report: the page is '{path.name}'; its name must end in .html.")
    require_packages("report", "report", "altair", "jinja2", "vl_convert", "scipy", "sklearn")
    sections = [_section(folder, label) for label, folder in labelled(folders).items()]
    charts = _charts(sections)
    if not charts:
        raise DataError(f"report: {', '.join(map(str, folders))}: there is nothing that can be drawn.")
    html = _rendered(_default_title(sections) if title is None else title, sections, charts)
    written: list[Path] = []
    with atomic_write(path, OSError) as draft:  # replaces the older page after the files beside it were written
        draft.write_text(html, encoding="utf-8")
        if is_dir(path):
            raise StoreError(f"report: {path} is a folder. Give the path of a file.")
        if as_files:
            written = _write_files(path, sections, charts)
    return Page(path, written, [section.label for section in sections], len(charts))


def _default_title(sections: Sequence[Section]) -> str:
    """Return a page title that says what was studied.

    It names up to two models (more: "several models"; none: "the model"), and up to three tasks ("and 2 more").
    """
    models = list(dict.fromkeys(section.model.rpartition("/")[2] for section in sections if section.model))
    tasks = list(dict.fromkeys(task for section in sections for task in section.tasks))
    kinds = list(dict.fromkeys(section.kind for section in sections))
    model = " and ".join(models) if 0 < len(models) <= 2 else "several models" if models else "the model"
    named = ", ".join(tasks[:3]) + (f" and {len(tasks) - 3} more" if len(tasks) > 3 else "")
    template = TITLES.get(kinds[0]) if len(kinds) == 1 else None
    if template is not None and (tasks or "{tasks}" not in template):
        return template.format(model=model, tasks=named)
    studied = f"{len(kinds)} studies" if len(kinds) > 1 else kinds[0].replace("_", " ").capitalize()
    return f"{studied} of {model}" + (f": {named}" if tasks else "")


def _section(folder: Path, label: str) -> Section:
    """Return the page's section about the study or training run in a folder; `label` is its name on the page.

    If a process died while it was replacing files there, that is undone first. Raises StoreError if the folder is
    missing, damaged, or holds neither a study nor a finished training run; DataError if the table of the study is
    empty. Also raises UnknownNameError, ConfigError or DataError as `drawing_of` does.
    """
    if not is_dir(folder):
        raise StoreError(f"report: there is no folder {folder}.")
    settle(folder)
    if is_file(folder / STUDY):
        from lamina.studies.study import Study

        study = Study.load(folder)
        if study.table.empty:
            raise DataError(f"report: the study in {folder} has an empty table. Run it again.")
        return study_section(study, label)
    if is_file(folder / REPORT):
        return run_section(folder, label)
    contents = "is empty" if not any(folder.iterdir()) else f"holds neither {STUDY} nor {REPORT}"
    problem = "it belongs to no study or training run, or to one that has not ended"
    raise StoreError(
        f"report: {folder} {contents}: {problem}. Give the output folder of `lamina study` or `lamina train`."
    )


@final
@dataclass(frozen=True)
class _Chart:
    """A chart on the page.

    Charts of an equal `name`, from several studies or runs (`section`), are comparable. `spec` is `drawing` in
    Vega-Lite, with its data, and `number` the chart's number on the page, from 1.
    """

    section: Section
    name: str
    drawing: Drawing
    spec: Spec
    number: int

    @property
    def layout(self) -> dict[str, int]:
        """Sizes by which the page's script fits the chart into the page, such as "panels"; see `layout_of`."""
        return layout_of(self.drawing)

    @property
    def wide(self) -> bool:
        return self.layout.get("columns", 0) >= FULL or self.layout["panels"] > 1

    @property
    def file(self) -> str:
        return _file_name(self.number, self.section.label, self.name)


def _charts(sections: Sequence[Section]) -> list[_Chart]:
    """Return the charts of all sections in the order of the page.

    Charts of equal name from sections of the same kind stand next to each other and share the scale of their values.
    Raises MissingExtraError if the packages of `lamina[report]` are not installed.
    """
    places: dict[tuple[str, str], list[tuple[Section, Drawing]]] = {}
    kinds = list(dict.fromkeys(section.kind for section in sections))
    for section in sorted(sections, key=lambda section: kinds.index(section.kind)):
        for name, drawing in section.drawings.items():
            places.setdefault((section.kind, name), []).append((section, drawing))
    charts: list[_Chart] = []
    for (_, name), group in places.items():
        values = values_of(row for _, drawing in group for row in drawing.rows)
        domain = (min(values), max(values)) if len(group) > 1 else None  # one scale for charts that stand side by side
        charts += [
            _Chart(section, name, drawing, spec_of(drawing, domain), len(charts) + number)
            for number, (section, drawing) in enumerate(group, start=1)
        ]
    return charts


def _leading(charts: Sequence[_Chart]) -> list[_Chart]:
    """Return the charts shown beside the verdicts, at the top of the page.

    These are the page's first chart, and those of its name from sections of its kind. If they are more than two
    (`MOST_LEADING`), only the first is shown.
    """
    first = charts[0]
    group = [chart for chart in charts if (chart.section.kind, chart.name) == (first.section.kind, first.name)]
    return group if len(group) <= MOST_LEADING else [first]


def _rendered(title: str, sections: Sequence[Section], charts: Sequence[_Chart]) -> str:
    import vl_convert
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from lamina.studies.study import library_versions

    names, templates = ("page.html.j2", "page.css", "theme.js", "page.js"), files("lamina.report") / "templates"
    html, css, early, own = ((templates / name).read_text(encoding="utf-8") for name in names)
    # The type stub requires a snippet of code as argument, but bundling a snippet takes seconds.
    bundle = cast("Callable[[], str]", vl_convert.javascript_bundle)
    scripts = {"early": early, "own": own, "vega": bundle()}
    tables = [(section, table) for section in sections for table in section.tables]
    data = {
        "charts": [{"spec": chart.spec, "layout": chart.layout, "file": chart.file} for chart in charts],
        "tables": [{**table.compact(), "file": _file_name(0, run.label, table.title)} for run, table in tables],
        "themes": {"light": theme(dark=False), "dark": theme(dark=True)},
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["counted"] = pluralize
    environment.filters["combined"] = lambda first, second: {**first, **second}
    return environment.from_string(html).render(
        title=title,
        sections=sections,
        kinds=list(dict.fromkeys(chart.section.kind for chart in charts)),
        charts=charts,
        leading=_leading(charts),
        tables=tables,
        version=library_versions()["lamina"],
        css=Markup(css),
        scripts={name: Markup(text) for name, text in scripts.items()},
        hashes=" ".join(f"'sha256-{_digest(text)}'" for text in scripts.values()),
        data=Markup(_embedded(data)),
    )


def _digest(text: str) -> str:
    """Return the SHA-256 of a script in base64, by which the page's security policy allows the script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(data: Mapping[str, object]) -> str:
    """Return data as JSON with "<", ">" and "&" escaped, so that no text in it can end the HTML element around it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file_name(number: int, *parts: str) -> str:
    """Return a file name without suffix: lower-case letters, digits and hyphens from a number (0: none) and texts.

    Each text is cut to 60 characters. If nothing is left of all of them, "run" takes their place.
    """
    words = "-".join(filter(None, (_NOT_IN_NAMES.sub("-", part.lower()).strip("-")[:60] for part in parts))) or "run"
    return f"{number:02d}-{words}" if number else words


def _write_files(path: Path, sections: Sequence[Section], charts: Sequence[_Chart]) -> list[Path]:
    """Write every chart and table into the folder beside the page, all files or none, and return their paths.

    Files that an earlier page with this name wrote are replaced or removed. Raises StoreError if the folder cannot be
    written, has files of the same names from elsewhere, or its list of files is damaged.
    """
    beside = path.with_name(f"{path.stem}_files")
    old = read_json(beside / MARK).get("files") if is_file(beside / MARK) else None
    with staged(beside, [MARK], map(str, old) if isinstance(old, list) else ()) as stage:
        names = _write_charts(charts, stage)
        tables = [(section, table) for section in sections for table in section.tables]
        for number, (section, table) in enumerate(tables, start=1):
            name = f"table-{_file_name(number, section.label, table.title)}"
            for ending, text in ((".md", table.markdown()), (".tex", table.latex())):
                write_text(stage / f"{name}{ending}", text)
                names.append(f"{name}{ending}")
        write_text(stage / MARK, json.dumps({"page": path.name, "files": names}, indent=1))
    return [beside / name for name in names]


def _write_charts(charts: Sequence[_Chart], folder: Path) -> list[str]:
    """Write each chart as SVG and PNG into `folder`, and return the names of the files.

    Raises StoreError if a file cannot be written.
    """
    import vl_convert

    names = [f"{chart.file}.{kind}" for chart in charts for kind in ("svg", "png")]
    for chart in charts:
        below = " · ".join(filter(None, (chart.section.label, chart.drawing.remark)))
        svg = folder / f"{chart.file}.svg"
        save_chart(sized(chart.spec, chart.drawing), svg, chart.drawing.title, [below])
        png = vl_convert.svg_to_png(svg.read_text(encoding="utf-8"), scale=PIXELS)
        (folder / f"{chart.file}.png").write_bytes(png)
    return names
