"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const SHOWN = 8; // labels and classes of a task that are shown at once; the others are behind "more"
  const SCALES = [0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1]; // ends of the axis of layer shares
  let bank = null, pending = null; // the answer of /info, and the AbortController of the question that runs

  // Elements are always built from text, never from markup.

  const make = (tag, fields, ...children) => {
    const element = Object.assign(document.createElement(tag), fields);
    element.append(...children);
    return element;
  };
  const quiet = (text) => make("p", { className: "quiet" }, text);
  const percent = (share) => `${(share * 100).toFixed(1)} %`;
  const withMore = (items, render) => {
    const shown = [render(items.slice(0, SHOWN))], rest = items.slice(SHOWN);
    if (rest.length) shown.push(make("details", {}, make("summary", { className: "quiet" }, `${rest.length} more`), render(rest)));
    return shown;
  };

  // Theme: the system's, until the button is used.

  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const showTheme = () => byId("theme").setAttribute("aria-pressed", String(isDark()));
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("lamina-theme", root.dataset.theme);
    } catch {
      // the browser allows no storage: the choice holds until the page is closed
    }
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // Requests. Each carries the key if there is one, and returns JSON or throws an Error with a readable message.

  const authorization = () => {
    const key = sessionStorage.getItem("lamina-key");
    return key === null ? {} : { Authorization: `Bearer ${key}` };
  };
  const call = async (path, body, signal) => {
    const headers = { ...authorization(), ...(body && { "Content-Type": "application/json" }) };
    let response, json;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
      json = await response.json();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not respond. Is it still running?");
    }
    if (response.ok) return json;
    if (response.status === 401) lock();
    throw new Error(readable(json.error ?? "the server could not answer"));
  };
  // The server's messages are written for clients of the API; replace what a user of the page cannot do.
  const readable = (message) => {
    const text = message
      .replace(/^serve: /, "")
      .replace(/^(text|file) 0 /, "the $1 ")
      .replace(/ Send truncate=true to cut it\.$/, " Tick the box to cut it off.")
      .replace(/ Send Authorization: Bearer KEY\.$/, "");
    return text.charAt(0).toUpperCase() + text.slice(1);
  };
  const showProblem = (text) => {
    byId("problem").textContent = text;
    byId("problem").hidden = !text;
  };

  // API key

  const lock = () => {
    sessionStorage.removeItem("lamina-key");
    byId("unlock").hidden = false;
    byId("ask").hidden = true;
    writer.hide();
    byId("key").focus();
  };
  const writer = newWriter({ byId, make, quiet, authorization, lock, readable, showProblem });
  byId("unlock").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) return showProblem("A key consists of ASCII letters, digits and punctuation, without spaces.");
    sessionStorage.setItem("lamina-key", key);
    byId("key").value = "";
    byId("unlock").hidden = true;
    start();
  });

  // The question, and the link that holds it

  const taskList = () => Object.values(bank.tasks);
  const file = () => byId("file").files[0];
  const media = () => new Set(taskList().map((task) => task.reads));
  const longest = () => Math.max(...taskList().filter((task) => task.reads === "text").map((task) => task.max_length));
  const mediumOf = (chosen) => [...media()].find((medium) => chosen.type.startsWith(`${medium}/`));
  const inputs = async () => {
    if (!file()) return byId("second").value ? [byId("text").value, byId("second").value] : byId("text").value;
    const encoded = await new Promise((resolve, reject) => {
      const reader = Object.assign(new FileReader(), { onload: () => resolve(reader.result), onerror: () => reject(reader.error) });
      reader.readAsDataURL(file());
    });
    return { [mediumOf(file())]: encoded.slice(encoded.indexOf(",") + 1) };
  };
  // Why the question cannot be sent; "" if it can.
  const obstacle = () => {
    if (!file()) return byId("texts").hidden ? "Choose a file first." : byId("text").value.trim() ? "" : "Type a text first.";
    if (!mediumOf(file())) return `${file().name} cannot be read here. This bank reads files of type ${[...media()].filter((medium) => medium !== "text").join(" and ")}.`;
    const size = Math.ceil(file().size / 3) * 4, limit = bank.payload_limit; // Base64 has 4 characters for 3 bytes
    const megabytes = (characters) => `${((characters * 3) / 4e6).toFixed(1)} MB`;
    return size + 1000 > limit ? `${file().name} has ${megabytes(size)}; this server accepts up to ${megabytes(limit)}.` : "";
  };
  byId("file").addEventListener("change", () => {
    for (const old of byId("preview").children) URL.revokeObjectURL(old.src);
    const medium = file() && mediumOf(file());
    const fields = medium && { src: URL.createObjectURL(file()), alt: file().name, controls: true };
    byId("preview").replaceChildren(...(medium ? [make(medium === "image" ? "img" : "audio", fields)] : []));
    byId("link").hidden = Boolean(file()); // a link holds texts only
    byId("texts").hidden = Boolean(file()) || !media().has("text");
    if (file()) ask();
  });
  // No second box for a bank that learnt no pairs, unless a link brings a second text, which must not be hidden.
  // Banks that were put together without `fit` say nothing about pairs (null): they have the box.
  const learntPairs = () => {
    const known = taskList().filter((task) => task.reads === "text" && task.pairs !== null);
    return !known.length || known.some((task) => task.pairs);
  };
  const setTexts = (text, second) => {
    byId("text").value = text;
    byId("second").value = second;
    byId("pair").open = second !== "";
    byId("pair").hidden = second === "" && !learntPairs();
  };
  const remember = () => {
    const fields = new URLSearchParams({ text: byId("text").value });
    if (byId("second").value) fields.set("second", byId("second").value);
    if (byId("truncate").checked) fields.set("truncate", "1");
    history.replaceState(null, "", `#${fields}`);
  };
  const restore = () => {
    const fields = new URLSearchParams(location.hash.slice(1));
    if (!fields.has("text")) return false;
    setTexts(fields.get("text"), fields.get("second") ?? "");
    byId("truncate").checked = fields.has("truncate");
    ask();
    return true;
  };
  byId("link").addEventListener("click", async () => {
    remember();
    try {
      await navigator.clipboard.writeText(location.href);
      byId("link").textContent = "Copied";
    } catch {
      byId("link").textContent = "Copy it from the address bar"; // pages without https may not write to the clipboard
    }
    setTimeout(() => (byId("link").textContent = "Copy link"), 2500);
  });

  const answeringTasks = () => {
    const medium = file() ? mediumOf(file()) : "text";
    return Object.keys(bank.tasks).filter((task) => bank.tasks[task].reads === medium);
  };
  const ask = async () => {
    pending?.abort(); // a new question replaces the one that runs
    const question = (pending = new AbortController());
    showProblem(obstacle());
    if (obstacle()) {
      byId("answers").setAttribute("aria-busy", "false"); // the question before was aborted
      return;
    }
    const text = byId("second").value || byId("text").value;
    if (!file()) remember();
    byId("answers").setAttribute("aria-busy", "true");
    try {
      bank = await call("info", null, question.signal); // readers may have been added or removed since
      const body = { inputs: await inputs(), truncate: byId("truncate").checked, tasks: answeringTasks() };
      const [answers] = await call("predict", { ...body, inputs: [body.inputs] }, question.signal);
      showAnswers(answers, text);
      const explanation = await call("explain", { ...body, tasks: Object.keys(answers) }, question.signal);
      showExplanation(explanation, file() ? "file" : "text");
    } catch (error) {
      if (error.name === "AbortError") return;
      showProblem(error.message);
    }
    byId("answers").setAttribute("aria-busy", "false");
  };
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  addEventListener("hashchange", () => {
    if (bank?.writes_text) writer.begin(bank);
    if (bank) restore();
  });

  // Before the first question: examples, and the labels of each reader

  const showExamples = () => {
    const buttons = bank.examples.map((example) => {
      const [text, second = ""] = [example].flat();
      const label = second ? `${text} / ${second}` : text;
      const button = make("button", { type: "button", title: label }, label);
      button.addEventListener("click", () => {
        setTexts(text, second);
        ask();
      });
      return button;
    });
    byId("examples").replaceChildren(...buttons);
    byId("examples").hidden = !buttons.length;
  };
  // Labels of spans carry their place in the span as a prefix (B-, I-, ...), and "O" means that there is no span.
  const plainLabels = ({ labels }) => {
    if (!labels.some((label) => /^[BIES]-/.test(label))) return labels;
    return [...new Set(labels.map((label) => label.replace(/^[BIES]-/, "")))].filter((label) => label !== "O");
  };
  const chips = (labels) => make("ul", { className: "chips" }, ...labels.map((label) => make("li", {}, label)));
  const possibleAnswers = (task) => {
    if (task.problem_type === "regression") return [quiet("Answers with a number.")];
    if (!task.has_classes) return [quiet("Answers with words from the model's vocabulary.")];
    return withMore(plainLabels(task), chips);
  };
  const showReaders = () => {
    const cards = Object.entries(bank.tasks).map(([name, task]) => {
      const kind = task.kind.replaceAll("_", " ") + (task.problem_type === "multi_label" ? ", several labels at once" : "");
      return make("article", { className: "card reader" }, make("h2", {}, name), quiet(kind), ...possibleAnswers(task));
    });
    byId("readers").replaceChildren(...cards);
  };

  // Answers

  const bars = (rows, isFirst, { full = 1, mark = null } = {}) => {
    const grid = make("div", { className: "bars" });
    for (const { label, score } of rows) {
      const emphasis = isFirst(score) ? " first" : "";
      const filled = make("i"), track = make("span", { className: mark === null ? "track" : "track marked" }, filled);
      filled.style.setProperty("--share", Math.max(0, Math.min(1, score / full)));
      if (mark !== null) track.style.setProperty("--mark", mark / full);
      grid.append(make("span", { className: `label${emphasis}` }, label), track, make("span", { className: `number${emphasis}` }, percent(score)));
    }
    return grid;
  };
  const classBars = (rows, task) => {
    const isMultiLabel = bank.tasks[task].problem_type === "multi_label", best = Math.max(...rows.map((row) => row.score));
    const isFirst = (score) => (isMultiLabel ? score >= 0.5 : score === best);
    return withMore(rows, (shown) => bars(shown, isFirst));
  };
  const markedText = (spans, text, task) => {
    const characters = Array.from(text); // places are counted in characters, not in units of UTF-16
    const labels = plainLabels(bank.tasks[task]);
    const line = make("p", { className: "said" });
    let end = 0;
    for (const span of [...spans].sort((a, b) => a.start - b.start)) {
      if (span.start < end) continue; // overlaps the span before
      const label = span.label ?? span.candidates?.map((candidate) => candidate.token).join(", ") ?? "";
      const tag = make("span", { className: "tag" }, span.score === undefined ? label : `${label} ${percent(span.score)}`);
      const colour = `own${Math.max(0, labels.indexOf(label)) % 6}`;
      line.append(characters.slice(end, span.start).join(""));
      line.append(make("mark", { className: colour }, characters.slice(span.start, span.end).join(""), tag));
      end = span.end;
    }
    line.append(characters.slice(end).join(""));
    return spans.length ? [line] : [line, quiet("Nothing found.")];
  };
  const renderAnswer = (answer, text, task) => {
    if (Array.isArray(answer)) {
      const isClasses = answer.length && "score" in answer[0] && !("start" in answer[0]);
      return isClasses ? classBars(answer, task) : markedText(answer, text, task);
    }
    if ("value" in answer) return [make("p", { className: "value" }, String(Number(answer.value.toPrecision(4))))];
    if ("candidates" in answer) return classBars(answer.candidates.map(({ token, score }) => ({ label: token, score })), task);
    return [make("p", { className: "said" }, answer.text ?? JSON.stringify(answer))];
  };
  const pairNote = (task) => {
    const { pairs, reads } = bank.tasks[task], isPair = byId("second").value !== "";
    if (reads !== "text" || pairs === null || pairs === isPair) return [];
    return [quiet(pairs ? "Trained on pairs of texts; this is a single text." : "Trained on single texts; this is a pair.")];
  };
  const showAnswers = (answers, text) => {
    byId("timing").hidden = true; // until the explanation of this answer is there
    byId("readers").hidden = true;
    byId("answers").replaceChildren(
      ...Object.entries(answers).map(([task, answer]) => {
        const left = make("div", { className: "answer" }, ...renderAnswer(answer, text, task), ...pairNote(task));
        const card = make("article", { className: "card task" }, make("h2", {}, task), left);
        card.dataset.task = task;
        return card;
      }),
    );
  };

  // Explanations: the layers and tokens that an answer comes from

  const sums = (rows) => rows.map((row) => row.reduce((sum, share) => sum + share, 0));
  const layerName = (layer) => (layer === 0 ? "0, embeddings" : String(layer));
  const layerShares = (reasons) => {
    const { layers, importance, contributions } = reasons;
    if (layers.length === 1) return [quiet(`Reads layer ${layerName(layers[0])} only.`)];
    const shares = importance ?? (contributions && sums(contributions));
    if (!shares) return [quiet(`Reads layers ${layers.join(", ")}, without a weight for each.`)];
    const equal = 1 / layers.length, largest = Math.max(...shares), full = SCALES.find((end) => end >= 1.05 * Math.max(largest, equal)) ?? 1;
    const rows = layers.map((layer, row) => ({ label: layerName(layer), score: shares[row] })).reverse(); // top layer first
    const chart = bars(rows, (score) => score === largest && largest > 1.05 * equal, { full, mark: equal });
    chart.append(make("span", { className: "axis" }, make("span", {}, "0"), make("span", {}, `${full * 100} %`)));
    const line = make("span", { className: "line" });
    line.setAttribute("aria-hidden", "true");
    const note = `1/${layers.length} = ${percent(equal)}: every layer's share if all counted the same.`;
    return [chart, make("p", { className: "quiet legend" }, line, note)];
  };
  const shade = (element, share, title) => {
    element.style.setProperty("--share", share);
    element.title = title;
    return element;
  };
  const tokenShares = ({ tokens, contributions }) => {
    const shares = sums(tokens.map((_, token) => contributions.map((row) => row[token])));
    const largest = Math.max(...shares);
    const words = tokens.map((token, place) => shade(make("span", {}, token), shares[place] / largest, `${token}: ${percent(shares[place])}`));
    return make("p", { className: "shaded" }, ...words);
  };
  const heatmap = ({ tokens, layers, contributions }) => {
    const largest = Math.max(...contributions.flat());
    const row = (shares, layer) => {
      const title = (token) => `${tokens[token]} · layer ${layer}: ${percent(shares[token])}`;
      const cells = shares.map((share, token) => shade(make("td"), share / largest, title(token)));
      return make("tr", {}, make("th", { scope: "row" }, String(layer)), ...cells);
    };
    const heads = tokens.map((token) => make("th", { scope: "col" }, token));
    const rows = contributions.map((shares, place) => row(shares, layers[place])).reverse();
    const table = make("table", {}, make("thead", {}, make("tr", {}, make("td"), ...heads)), make("tbody", {}, ...rows));
    const box = make("div", { className: "heat", tabIndex: 0 }, table);
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Contribution of each layer at each token");
    return [box, quiet(`Rows are layers. The strongest cell contributes ${percent(largest)} of the total.`)];
  };
  const showExplanation = (explanation, what) => {
    const { without_readers: alone, with_readers: together } = explanation.seconds, count = Object.keys(explanation.tasks).length;
    const ms = (seconds) => `${(seconds * 1000).toPrecision(3)} ms`;
    const difference = together > alone ? `+${((together / alone - 1) * 100).toFixed(0)} %` : "no measurable difference";
    const readers = `${count} ${count === 1 ? "reader" : "readers"}`;
    byId("time").textContent = `One pass over this ${what}: ${ms(alone)} without readers, ${ms(together)} with ${readers} (${difference}).`;
    byId("timing").hidden = false;
    for (const card of byId("answers").children) {
      const reasons = explanation.tasks[card.dataset.task];
      const heading = reasons.importance ? "Importance of each layer" : reasons.contributions ? "Contribution of each layer to this answer" : "Layers";
      card.append(make("div", { className: "layers" }, make("h3", {}, heading), ...layerShares(reasons)));
      if (reasons.contributions) card.append(make("div", { className: "tokens" }, make("h3", {}, "Contribution of each token"), tokenShares(reasons), ...heatmap(reasons)));
    }
  };

  // Start

  const start = async () => {
    showProblem("");
    const hadKey = sessionStorage.getItem("lamina-key") !== null;
    try {
      bank = await call("info");
    } catch (error) {
      return showProblem(byId("unlock").hidden || hadKey ? error.message : ""); // a first visit needs no error, only the form
    }
    const count = taskList().length, hasText = media().has("text");
    byId("name").textContent = document.title = bank.title;
    const plural = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`, monitors = Object.keys(bank.monitors).length;
    const who = `${bank.writes_text ? `scored while ${bank.model_type} writes` : `answered in one pass of ${bank.model_type}`} on ${bank.device}`;
    byId("about").textContent = `${plural(count, "task")}${monitors ? ` and ${plural(monitors, "monitor")}` : ""}, ${who}${hasText ? ` · texts of up to ${longest()} tokens` : ""}`;
    const fileMedia = [...media()].filter((medium) => medium !== "text");
    byId("texts").hidden = !hasText;
    byId("link").hidden = !hasText;
    byId("cut").hidden = [...media()].every((medium) => medium === "image"); // an image is never cut
    byId("files").hidden = !fileMedia.length;
    byId("file").accept = fileMedia.map((medium) => `${medium}/*`).join();
    byId("file-label").textContent = fileMedia.map((medium) => ({ image: "Image", audio: "Audio" })[medium] ?? medium).join(" or ");
    setTexts(byId("text").value, byId("second").value); // a text that was typed stays when the key is asked for again
    showExamples();
    showReaders();
    byId("ask").hidden = false;
    if (bank.writes_text) writer.begin(bank);
    if (!restore() && !bank.writes_text) (hasText ? byId("text") : byId("file")).focus();
  };
  start();
})();
