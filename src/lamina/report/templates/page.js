"use strict";
(() => {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const root = document.documentElement;
  const make = (name, fields = {}, ...children) => {
    const element = Object.assign(document.createElement(name), fields);
    element.append(...children);
    return element;
  };
  const save = (name, href) => make("a", { href, download: name }).click();
  const saveText = (name, text) => {
    const url = URL.createObjectURL(new Blob([text], { type: "text/plain;charset=utf-8" }));
    save(name, url);
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  };

  // The theme: the system's, until the switch is used.

  const system = matchMedia("(prefers-color-scheme: dark)");
  const themeName = () => root.dataset.theme || (system.matches ? "dark" : "light");
  const themeSwitch = document.getElementById("theme");
  const showTheme = () => {
    themeSwitch.setAttribute("aria-pressed", String(themeName() === "dark"));
    redraw();
  };
  themeSwitch.addEventListener("click", () => {
    root.dataset.theme = themeName() === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("lamina-theme", root.dataset.theme);
    } catch {
      // nothing is kept: the next visit follows the system
    }
    showTheme();
  });
  system.addEventListener("change", showTheme);

  // Charts: drawn when they come near, and again when the theme or their room changes.

  const MANY = 2500; // marks from which a chart is pixels, not elements
  const PANEL = 250; // of a panel, at the least
  const drawn = new Map(); // box -> what it shows: view, theme, width

  const across = (chart, room) => Math.max(1, Math.min(chart.layout.panels, 3, Math.floor(room / PANEL)));

  function fitted(chart, room, panel) {
    const spec = structuredClone(chart.spec);
    const { panels, columns, step, margin } = chart.layout;
    if (panels) {
      spec.columns = across(chart, room);
      spec.spec.width = panel || Math.floor(room / spec.columns) - 60;
    } else if (columns && columns * step > room - margin) {
      spec.width = { step };
    } else {
      spec.width = room;
      spec.autosize = { type: "fit-x", contains: "padding" };
    }
    return spec;
  }

  async function draw(box) {
    const chart = page.charts[Number(box.dataset.chart)];
    const theme = themeName(), room = box.clientWidth;
    const last = drawn.get(box);
    if (!room || (last && last.theme === theme && last.room === room)) return;
    const state = { theme, room };
    drawn.set(box, state);
    const base = page.themes[theme];
    const legend = { ...base.legend, columns: Math.max(1, Math.floor(room / 170)), labelLimit: Math.min(240, room - 60) };
    const header = { ...base.header, labelLimit: Math.floor(room / across(chart, room)) - 60 };
    const config = { ...base, legend, header };
    const options = {
      mode: "vega-lite", ast: true, actions: false, defaultStyle: false, config,
      renderer: chart.layout.marks > MANY ? "canvas" : "svg",
      tooltip: { disableDefaultStyle: true },
    };
    if (last) box.style.minHeight = `${box.offsetHeight}px`;
    let shown = await vegaEmbed(box, fitted(chart, room), options);
    const over = box.scrollWidth - room;
    if (chart.layout.panels && over > 0) {
      const panel = Math.max(120, shown.spec.spec.width - Math.ceil(over / across(chart, room)) - 2);
      shown.finalize();
      shown = await vegaEmbed(box, fitted(chart, room, panel), options);
    }
    box.style.minHeight = "";
    if (drawn.get(box) !== state) return shown.finalize();
    if (last && last.finalize) last.finalize();
    Object.assign(state, { view: shown.view, finalize: shown.finalize });
    box.dataset.drawn = theme;
  }

  const redraw = () => drawn.forEach((_, box) => draw(box));
  const near = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => draw(entry.target)),
    { rootMargin: "600px" },
  );
  document.querySelectorAll("[data-chart]").forEach((box) => near.observe(box));
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 150);
  });
  document.querySelectorAll("[data-save]").forEach((button) => {
    button.addEventListener("click", async () => {
      const box = button.closest("figure").querySelector("[data-chart]");
      await draw(box);
      const kind = button.dataset.save;
      save(`${page.charts[Number(box.dataset.chart)].file}.${kind}`, await drawn.get(box).view.toImageURL(kind, 2));
    });
  });

  // Tables: sorted by their headings, filtered by a text or a comparison, some rows at a time.

  const STEP = 50; // rows that are shown at a time
  const FEW = 30; // values of a column up to which they are offered as a list
  const COMPARISON = /^\s*(>=|<=|>|<|=)\s*(-?[\d.]+(?:e-?\d+)?)\s*$/i;
  const unpacked = (column) => column.cells || column.codes.map((code) => column.levels[code]);
  const numberOf = (cell) => (typeof cell === "number" ? cell : parseFloat(cell));
  const text = (cell) => (cell === null ? "" : String(cell));
  const shown = (cell) =>
    typeof cell === "number" && !Number.isInteger(cell) ? String(Number(cell.toPrecision(4))) : text(cell);

  function matcher(asked) {
    const comparison = COMPARISON.exec(asked);
    if (!comparison) {
      const wanted = asked.trim().toLowerCase();
      return (cell) => text(cell).toLowerCase().includes(wanted);
    }
    const [, sign, number] = comparison, bound = parseFloat(number);
    const compare = { ">": (n) => n > bound, "<": (n) => n < bound, ">=": (n) => n >= bound, "<=": (n) => n <= bound, "=": (n) => n === bound };
    return (cell) => compare[sign](numberOf(cell));
  }

  function compared(numeric, descending) {
    const turn = descending ? -1 : 1;
    return (a, b) => {
      const [left, right] = numeric ? [numberOf(a), numberOf(b)] : [text(a), text(b)];
      const [noLeft, noRight] = numeric ? [Number.isNaN(left), Number.isNaN(right)] : [left === "", right === ""];
      if (noLeft || noRight) return noLeft - noRight; // what is missing comes last, whichever way
      return turn * (numeric ? left - right : left.localeCompare(right, undefined, { numeric: true }));
    };
  }

  const quoted = (cell) => (/[",\n\r]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell);
  const latex = (cell) => {
    const special = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$" };
    return cell.replace(/[\\~^±&%$#_{}]/g, (sign) => special[sign] || `\\${sign}`);
  };
  const markdown = (cell) => cell.replace(/[\\|*_<>[\]`]/g, "\\$&").replace(/\s+/g, " ");
  const written = {
    csv: (lines) => lines.map((line) => line.map(quoted).join(",")).join("\n"),
    md: ([head, ...lines]) =>
      [head, head.map(() => "---"), ...lines].map((line, at) => `| ${line.map(at === 1 ? String : markdown).join(" | ")} |`).join("\n"),
    tex: ([head, ...lines]) => {
      const row = (line) => `${line.map(latex).join(" & ")} \\\\`;
      const begin = `\\begin{longtable}{${"l".repeat(head.length)}}`;
      return [begin, "\\toprule", row(head), "\\midrule", "\\endhead", ...lines.map(row), "\\bottomrule", "\\end{longtable}"].join("\n");
    },
  };

  function table(card) {
    const data = page.tables[Number(card.dataset.table)];
    const columns = data.columns.map((column) => {
      const cells = unpacked(column);
      const there = cells.filter((cell) => cell !== null && cell !== "");
      const numbers = there.every((cell) => typeof cell === "number");
      const numeric = there.length > 0 && there.every((cell) => /^[-+]?\.?\d[\d.,]*(e-?\d+)?( ± .*)?$/.test(String(cell)));
      const values = [...new Set(there)];
      const listed = values.length > 1 && values.length <= FEW && !values.some((v) => typeof v === "number" && !Number.isInteger(v)) && !(numeric && !numbers);
      return { name: column.name, cells, numeric, listed, values, wanted: "" };
    });
    const count = columns.length ? columns[0].cells.length : 0;
    let everywhere = "", sorted = null, limit = STEP, order = [];

    const body = make("tbody"), status = make("span", { className: "quiet" });
    status.setAttribute("role", "status");
    const more = make("button", { type: "button", className: "more", onclick: () => { limit += 10 * STEP; fill(); } });
    const heads = columns.map((column, at) => {
      const button = make("button", { type: "button", onclick: () => sort(at) }, column.name.replaceAll("_", " "));
      return make("th", { scope: "col", className: column.numeric ? "number" : "" }, button);
    });
    const filters = columns.map((column) => {
      const label = `Filter ${column.name.replaceAll("_", " ")}`;
      if (column.values.length < 2) return make("th");
      const field = column.listed
        ? make("select", {}, make("option", { value: "" }, "all"), ...column.values.sort(compared(column.numeric)).map((v) => make("option", {}, text(v))))
        : make("input", { type: "text", placeholder: column.numeric ? "> 0" : "text" });
      field.setAttribute("aria-label", label);
      for (const event of ["input", "change"]) field.addEventListener(event, () => { column.wanted = field.value; choose(); });
      return make("th", {}, field);
    });

    function choose() {
      const tests = columns.filter((column) => column.wanted !== "").map((column) => {
        const test = column.listed ? (cell) => text(cell) === column.wanted : matcher(column.wanted);
        return (row) => test(column.cells[row]);
      });
      if (everywhere.trim()) {
        const test = matcher(everywhere);
        tests.push((row) => columns.some((column) => test(column.cells[row])));
      }
      order = Array.from({ length: count }, (_, row) => row).filter((row) => tests.every((test) => test(row)));
      if (sorted) {
        const { cells, numeric } = columns[sorted.at], compare = compared(numeric, sorted.descending);
        order.sort((a, b) => compare(cells[a], cells[b]) || a - b);
      }
      limit = STEP;
      fill();
    }
    function sort(at) {
      sorted = { at, descending: sorted !== null && sorted.at === at && !sorted.descending };
      heads.forEach((head, other) => (other === at ? head.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
      choose();
    }
    function fill() {
      body.replaceChildren(...order.slice(0, limit).map((row) => make("tr", {}, ...columns.map(({ cells, numeric }) => {
        const cell = make("td", { className: numeric ? "number" : "" }, shown(cells[row]));
        if (typeof cells[row] === "number") cell.title = text(cells[row]);
        return cell;
      }))));
      const few = Math.min(limit, order.length).toLocaleString("en"), of = order.length.toLocaleString("en");
      status.textContent = `${few} of ${of} ${order.length === 1 ? "row" : "rows"}${order.length < count ? `, filtered from ${count.toLocaleString("en")}` : ""}`;
      more.hidden = order.length <= limit;
      more.textContent = `Show ${Math.min(10 * STEP, order.length - limit).toLocaleString("en")} more rows`;
    }

    const search = make("input", { type: "search", placeholder: "Filter all columns" });
    search.setAttribute("aria-label", "Filter all columns");
    search.addEventListener("input", () => { everywhere = search.value; choose(); });
    const buttons = [["csv", "CSV"], ["md", "Markdown"], ["tex", "LaTeX"]].map(([kind, name]) =>
      make("button", { type: "button", onclick: () => {
        const lines = [columns.map((column) => column.name), ...order.map((row) => columns.map(({ cells }) => (kind === "csv" ? text : shown)(cells[row])))];
        saveText(`${data.file}.${kind}`, `${written[kind](lines)}\n`);
      } }, name));
    const scroll = make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, make("thead", {}, make("tr", {}, ...heads), make("tr", {}, ...filters)), body));
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", data.title);
    card.append(make("div", { className: "tools" }, search, status, make("span", { className: "actions" }, ...buttons)), scroll, more);
    if (data.note) card.append(make("p", { className: "quiet" }, data.note));
    choose();
  }
  document.querySelectorAll("[data-table]").forEach(table);
  showTheme();
})();
