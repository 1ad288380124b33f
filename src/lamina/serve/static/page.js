"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const most = 8; // classes that are shown at once
  let bank = null, asking = null;

  // Elements: always from text, never from markup.

  const make = (tag, fields, ...children) => {
    const element = Object.assign(document.createElement(tag), fields);
    element.append(...children);
    return element;
  };
  const percent = (share) => `${(share * 100).toFixed(1)} %`;

  // The theme: the system's, until the switch is used.

  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const showTheme = () => at("theme").setAttribute("aria-pressed", String(isDark()));
  at("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("lamina-theme", root.dataset.theme);
    } catch {
      // a browser that keeps nothing
    }
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // The server: every request has the key, if there is one, and ends in what it says or in an Error in words.

  const keyed = () => {
    const key = sessionStorage.getItem("lamina-key");
    return key === null ? {} : { Authorization: `Bearer ${key}` };
  };
  const call = async (path, body, signal) => {
    const headers = { ...keyed(), ...(body && { "Content-Type": "application/json" }) };
    let response, said;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
      said = await response.json();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer. Is it still running?");
    }
    if (response.ok) return said;
    if (response.status === 401) lock();
    throw new Error(plain(said.error ?? "the server could not answer"));
  };
  const plain = (text) => {
    const own = text
      .replace(/^serve: /, "")
      .replace(/^(text|file) 0 /, "the $1 ")
      .replace(/ Send truncate=true to cut it\.$/, " Tick the box to have only its start read.")
      .replace(/ Send Authorization: Bearer KEY\.$/, "");
    return own.charAt(0).toUpperCase() + own.slice(1);
  };
  const tell = (text) => {
    at("problem").textContent = text;
    at("problem").hidden = !text;
  };

  // The key

  const lock = () => {
    const given = sessionStorage.getItem("lamina-key") !== null;
    sessionStorage.removeItem("lamina-key");
    at("unlock").hidden = false;
    at("ask").hidden = true;
    at("key").focus();
    return given;
  };
  at("unlock").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = at("key").value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) return tell("A key has letters, digits and signs, and no spaces.");
    sessionStorage.setItem("lamina-key", key);
    at("key").value = "";
    at("unlock").hidden = true;
    start();
  });

  // What is asked, and the link that holds it

  const file = () => at("file").files[0];
  const media = () => new Set(Object.values(bank.tasks).map((task) => task.reads));
  const longest = () => Math.max(...Object.values(bank.tasks).filter((task) => task.reads === "text").map((task) => task.max_length));
  const mediumOf = (one) => [...media()].find((medium) => one.type.startsWith(`${medium}/`));
  const inputs = async () => {
    if (!file()) return at("second").value ? [at("text").value, at("second").value] : at("text").value;
    const encoded = await new Promise((done, fail) => {
      const reader = Object.assign(new FileReader(), { onload: () => done(reader.result), onerror: () => fail(reader.error) });
      reader.readAsDataURL(file());
    });
    return { [mediumOf(file())]: encoded.slice(encoded.indexOf(",") + 1) };
  };
  const missing = () => {
    if (!file()) return at("texts").hidden ? "Choose a file first." : at("text").value.trim() ? "" : "Type a text first.";
    if (!mediumOf(file())) return `${file().name} is no file that this bank reads; it reads ${[...media()].join(" and ")}.`;
    const size = Math.ceil(file().size / 3) * 4, most = bank.payload_limit;
    const mb = (bytes) => `${((bytes * 3) / 4e6).toFixed(1)} MB`;
    return size + 1000 > most ? `${file().name} has ${mb(size)}; this server takes ${mb(most)}.` : "";
  };
  at("file").addEventListener("change", () => {
    for (const old of at("preview").children) URL.revokeObjectURL(old.src);
    const medium = file() && mediumOf(file());
    const fields = medium && { src: URL.createObjectURL(file()), alt: file().name, controls: true };
    at("preview").replaceChildren(...(medium ? [make(medium === "image" ? "img" : "audio", fields)] : []));
    at("link").hidden = Boolean(file()); // a link holds texts alone
    at("texts").hidden = Boolean(file()) || !media().has("text");
    if (file()) ask();
  });
  const remember = () => {
    const held = new URLSearchParams({ text: at("text").value });
    if (at("second").value) held.set("second", at("second").value);
    if (at("truncate").checked) held.set("truncate", "1");
    history.replaceState(null, "", `#${held}`);
  };
  const restore = () => {
    const held = new URLSearchParams(location.hash.slice(1));
    if (!held.has("text")) return false;
    at("text").value = held.get("text");
    at("second").value = held.get("second") ?? "";
    at("pair").open = at("second").value !== "";
    at("truncate").checked = held.has("truncate");
    ask();
    return true;
  };
  at("link").addEventListener("click", async () => {
    remember();
    try {
      await navigator.clipboard.writeText(location.href);
      at("link").textContent = "Copied";
    } catch {
      at("link").textContent = "It is in the address bar"; // pages without https may not write to the clipboard
    }
    setTimeout(() => (at("link").textContent = "Copy link"), 2500);
  });

  const answering = () => {
    const medium = file() ? mediumOf(file()) : "text";
    return Object.keys(bank.tasks).filter((task) => bank.tasks[task].reads === medium);
  };
  const ask = async () => {
    asking?.abort();
    const mine = (asking = new AbortController());
    tell(missing());
    if (missing()) {
      at("answers").setAttribute("aria-busy", "false"); // an earlier question was given up
      return;
    }
    const text = at("second").value || at("text").value;
    if (!file()) remember();
    at("answers").setAttribute("aria-busy", "true");
    try {
      bank = await call("info", null, mine.signal); // its readers may have changed since
      const body = { inputs: await inputs(), truncate: at("truncate").checked, tasks: answering() };
      const said = await call("predict", body, mine.signal);
      show(said, text);
      explain(await call("explain", { ...body, tasks: Object.keys(said) }, mine.signal), file() ? "file" : "text");
    } catch (error) {
      if (error.name === "AbortError") return;
      tell(error.message);
    }
    at("answers").setAttribute("aria-busy", "false");
  };
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  at("ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
  });
  addEventListener("hashchange", () => bank && restore());

  // Answers

  const bars = (rows, isFirst, full = 1) => {
    const grid = make("div", { className: "bars" });
    for (const { label, score } of rows) {
      const own = isFirst(score) ? "first" : "";
      const filled = make("i");
      filled.style.setProperty("--share", Math.max(0, Math.min(1, score / full)));
      const track = make("span", { className: "track" }, filled);
      grid.append(make("span", { className: own }, label), track, make("span", { className: `number ${own}` }, percent(score)));
    }
    return grid;
  };
  const classes = (rows, task) => {
    const several = bank.tasks[task].problem_type === "multi_label", top = Math.max(...rows.map((row) => row.score));
    const isFirst = (score) => (several ? score >= 0.5 : score === top);
    const shown = [bars(rows.slice(0, most), isFirst)];
    if (rows.length > most) {
      const rest = bars(rows.slice(most), isFirst);
      shown.push(make("details", {}, make("summary", { className: "quiet" }, `${rows.length - most} more`), rest));
    }
    return shown;
  };
  const marked = (spans, text, task) => {
    const letters = Array.from(text); // places are counted in characters, not in units of UTF-16
    const labels = [...new Set(bank.tasks[task].labels.map((label) => label.replace(/^[BIES]-/, "")))];
    const line = make("p", { className: "said" });
    let done = 0;
    for (const span of [...spans].sort((a, b) => a.start - b.start)) {
      if (span.start < done) continue;
      const label = span.label ?? span.candidates?.map((one) => one.token).join(", ") ?? "";
      const tag = make("span", { className: "tag" }, span.score === undefined ? label : `${label} ${percent(span.score)}`);
      const own = `own${Math.max(0, labels.filter((one) => one !== "O").indexOf(label)) % 6}`;
      line.append(letters.slice(done, span.start).join(""));
      line.append(make("mark", { className: own }, letters.slice(span.start, span.end).join(""), tag));
      done = span.end;
    }
    line.append(letters.slice(done).join(""));
    return spans.length ? [line] : [line, make("p", { className: "quiet" }, "Nothing is found.")];
  };
  const answer = (said, text, task) => {
    if (Array.isArray(said)) return said.length && "score" in said[0] && !("start" in said[0]) ? classes(said, task) : marked(said, text, task);
    if ("value" in said) return [make("p", { className: "value" }, String(Number(said.value.toPrecision(4))))];
    if ("candidates" in said) return classes(said.candidates.map((one) => ({ label: one.token, score: one.score })), task);
    return [make("p", { className: "said" }, said.text ?? JSON.stringify(said))];
  };
  const unlike = (task) => {
    const { pairs, reads } = bank.tasks[task], asked = at("second").value !== "";
    if (reads !== "text" || pairs === null || pairs === asked) return [];
    return [make("p", { className: "quiet" }, pairs ? "It learnt from pairs of texts; this is one." : "It learnt from single texts; this is a pair.")];
  };
  const show = (said, text) => {
    at("time").textContent = "";
    at("answers").replaceChildren(
      ...Object.entries(said).map(([task, own]) => {
        const left = make("div", { className: "answer" }, ...answer(own, text, task), ...unlike(task));
        const card = make("article", { className: "card task" }, make("h2", {}, task), left);
        card.dataset.task = task;
        return card;
      }),
    );
  };

  // Where answers came from

  const sums = (rows) => rows.map((row) => row.reduce((sum, share) => sum + share, 0));
  const layerName = (layer) => (layer === 0 ? "0, embeddings" : String(layer));
  const layers = (own) => {
    if (own.layers.length === 1) return make("p", { className: "quiet" }, `It reads layer ${layerName(own.layers[0])} alone.`);
    const shares = own.importance ?? (own.contributions && sums(own.contributions));
    if (!shares) return make("p", { className: "quiet" }, `It reads the layers ${own.layers.join(", ")}, and does not weigh them.`);
    const top = Math.max(...shares);
    const rows = own.layers.map((layer, row) => ({ label: layerName(layer), score: shares[row] })).reverse();
    return bars(rows, (score) => score === top && top > Math.min(...shares), top);
  };
  const shade = (element, share, title) => {
    element.style.setProperty("--share", share);
    element.title = title;
    return element;
  };
  const byToken = (own) => {
    const shares = sums(own.tokens.map((_, token) => own.contributions.map((row) => row[token])));
    const most = Math.max(...shares);
    const words = own.tokens.map((token, at) => shade(make("span", {}, token), shares[at] / most, `${token}: ${percent(shares[at])}`));
    return make("p", { className: "shaded" }, ...words);
  };
  const byLayer = (own) => {
    const most = Math.max(...own.contributions.flat());
    const row = (shares, layer) => {
      const title = (token) => `${own.tokens[token]} · layer ${layer}: ${percent(shares[token])}`;
      const cells = shares.map((share, token) => shade(make("td"), share / most, title(token)));
      return make("tr", {}, make("th", { scope: "row" }, String(layer)), ...cells);
    };
    const heads = own.tokens.map((token) => make("th", { scope: "col" }, token));
    const rows = own.contributions.map((shares, at) => row(shares, own.layers[at])).reverse();
    const table = make("table", {}, make("thead", {}, make("tr", {}, make("td"), ...heads)), make("tbody", {}, ...rows));
    const box = make("div", { className: "heat", tabIndex: 0 }, table);
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Contribution of each layer at each token");
    const note = `The stronger the colour, the more. The strongest cell is ${percent(most)} of all that is taken.`;
    return [box, make("p", { className: "quiet" }, note)];
  };
  const explain = (reasons, what) => {
    const { without_readers: alone, with_readers: together } = reasons.seconds, count = Object.keys(reasons.tasks).length;
    const ms = (seconds) => `${(seconds * 1000).toPrecision(3)} ms`;
    const more = together > alone ? `+${((together / alone - 1) * 100).toFixed(0)} %` : "no difference shows";
    at("time").textContent = `One pass over this ${what}: ${ms(alone)} without readers, ${ms(together)} with ${count === 1 ? "one" : count} (${more}).`;
    for (const card of at("answers").children) {
      const own = reasons.tasks[card.dataset.task];
      const learned = own.importance ? "Importance of each layer" : own.contributions ? "Each layer's part in this text" : "Layers";
      card.append(make("div", { className: "layers" }, make("h3", {}, learned), layers(own)));
      if (own.contributions) card.append(make("div", { className: "tokens" }, make("h3", {}, "What is taken of each token, and from which layer"), byToken(own), ...byLayer(own)));
    }
  };

  // The start

  const start = async () => {
    tell("");
    const given = sessionStorage.getItem("lamina-key") !== null;
    try {
      bank = await call("info");
    } catch (error) {
      return tell(at("unlock").hidden || given ? error.message : "");
    }
    const count = Object.keys(bank.tasks).length;
    at("name").textContent = document.title = bank.name;
    at("about").textContent = `${count} ${count === 1 ? "task" : "tasks"} read off one pass of ${bank.model_type} on ${bank.device}${media().has("text") ? ` · up to ${longest()} tokens` : ""}`;
    const others = [...media()].filter((medium) => medium !== "text");
    at("texts").hidden = !media().has("text");
    at("link").hidden = !media().has("text");
    at("cut").hidden = [...media()].every((medium) => medium === "image"); // which is read whole
    at("files").hidden = !others.length;
    at("file").accept = others.map((medium) => `${medium}/*`).join();
    at("file-label").textContent = others.map((medium) => ({ image: "Image", audio: "Sound" })[medium] ?? medium).join(" or ");
    at("ask").hidden = false;
    if (!restore()) (at("texts").hidden ? at("file") : at("text")).focus();
  };
  start();
})();
