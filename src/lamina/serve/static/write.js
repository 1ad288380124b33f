"use strict";
// The part of the page for a model that writes: a prompt, and the text with each monitor's score at each token.
const newWriter = ({ byId, make, quiet, authorization, lock, readable, showProblem }) => {
  let bank = null, running = null, panels = []; // the answer of /info, the AbortController of the text that runs

  // The server's events, one object at a time. An error in the middle of a text is an event too.

  async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new Error("The connection to the server was lost.");
      });
      if (done) throw new Error("The server closed the connection before the text was complete.");
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Error(readable(event.error.message ?? event.error));
        yield event;
        if (event.details && !event.choices) return; // the last event; that of a chat is [DONE]
      }
    }
  }
  const request = () => {
    const temperature = Number(byId("temperature").value), limit = Number(byId("tokens").value);
    const common = { stream: true, stop_on_flag: byId("stop-on-flag").checked && !byId("stopping").hidden };
    if (byId("chat").checked && bank.chats) {
      const messages = [{ role: "user", content: byId("prompt").value }];
      return ["v1/chat/completions", { ...common, messages, max_tokens: limit, temperature }];
    }
    const sampling = temperature > 0 ? { temperature, do_sample: true } : { do_sample: false };
    return ["generate", { ...common, inputs: byId("prompt").value, parameters: { max_new_tokens: limit, ...sampling } }];
  };
  const post = async ([path, body], signal) => {
    const headers = { ...authorization(), "Content-Type": "application/json" };
    let response;
    try {
      response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error("The server does not respond. Is it still running?");
    }
    if (response.ok) return response;
    if (response.status === 401) lock();
    const { error } = await response.json().catch(() => ({})); // a proxy may answer with a page
    throw new Error(readable(error?.message ?? error ?? "the server could not answer"));
  };

  // A panel shows the text once, coloured by one score: of a monitor, or of a label of a reader.

  const sigmoid = (x) => 1 / (1 + Math.exp(-x));
  // The place of a score on a scale from 0 to 1 on which the threshold is at 0.5.
  const placeOf = (score, { threshold, bounded }) => {
    if (!bounded) return sigmoid(score - (threshold ?? 0));
    const inside = Math.min(1, Math.max(0, score));
    if (threshold === null || threshold <= 0 || threshold >= 1) return inside;
    return inside < threshold ? (0.5 * inside) / threshold : 0.5 + (0.5 * (inside - threshold)) / (1 - threshold);
  };
  const rounded = (score) => (score === null ? "no score" : String(Number(score.toFixed(3))));
  const svg = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const newPanel = (title, rule, about, scoreOf, name) => {
    const text = make("p", { className: "written" }), curve = svg("polyline", { class: "curve", "vector-effect": "non-scaling-stroke" });
    const lines = svg("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none" }), chart = make("div", { className: "scores" }, lines);
    chart.setAttribute("aria-hidden", "true");
    if (rule.threshold !== null) {
      lines.append(svg("line", { class: "limit", x1: 0, x2: 100, y1: 20, y2: 20, "vector-effect": "non-scaling-stroke" }));
      chart.append(make("span", { className: "limit-name" }, `threshold ${rounded(rule.threshold)}`));
    }
    lines.append(curve);
    const detail = make("p", { className: "quiet detail" }, "Point at a token or tap it to see its score.");
    const flag = make("p", { className: "flag", role: "status", hidden: rule.threshold === null }, "Not flagged so far.");
    const card = make("article", { className: "card panel" }, make("h2", {}, title), quiet(about), flag, chart, make("div", {}, detail, text));
    card.dataset.panel = title;
    const places = [];
    let count = 0, isFlagged = false, frame = 0, latest = ""; // the end of the text: a token may be a part of a word
    const draw = () => {
      frame = 0;
      curve.setAttribute("points", places.map(([at, place]) => `${(100 * at) / Math.max(1, count - 1)},${40 - 38 * place - 1}`).join(" "));
    };
    const point = ({ target }) => {
      if (target.dataset?.score) detail.textContent = `Token ${target.dataset.number}, “${target.textContent.trim()}”: ${target.dataset.score}`;
    };
    text.addEventListener("pointerover", point);
    text.addEventListener("click", point); // a phone has no pointer that hovers
    const add = (event) => {
      const { token } = event, score = scoreOf(event);
      count += 1;
      latest = (latest + token.text).slice(-25);
      const span = make("span", { className: token.special ? "token special" : "token" }, token.text);
      Object.assign(span.dataset, { number: count, score: rounded(score) });
      if (score !== null) {
        const place = placeOf(score, rule);
        span.style.setProperty("--share", place);
        span.classList.toggle("over", rule.threshold !== null && score >= rule.threshold);
        places.push([count - 1, place]);
      }
      if (name !== null && event.flagged.includes(name) && !isFlagged) {
        isFlagged = true;
        span.classList.add("flagged");
        const spot = latest.length < 25 ? latest : `… ${latest.replace(/^\S*\s+(?=\S)/, "")}`;
        flag.textContent = `Flagged at token ${count}, “${spot.trim()}”: score ${rounded(score)}.`;
        flag.classList.add("raised");
        text.append(make("span", { className: "marker", title: "flagged here" }, "⚑"));
      }
      text.append(span);
      frame ||= requestAnimationFrame(draw); // once per frame: a long text has thousands of tokens
    };
    const end = (drift) => {
      if (!isFlagged) flag.textContent = "Not flagged.";
      if (drift[name]) text.after(make("p", { className: "drift" }, drift[name]));
    };
    return { card, add, end };
  };
  const rate = (monitor) => {
    const { threshold, false_positive_rate: alarms, recall } = monitor;
    if (threshold === null) return "no threshold, so it flags nothing";
    const percent = (share) => `${Number((100 * share).toFixed(1))} %`;
    const known = alarms === null ? "" : `; ${percent(alarms)} false alarms, catches ${percent(recall)}`;
    return `flags from ${rounded(threshold)} on${known}`;
  };
  // One panel for each monitor that takes part; without monitors, one for each reader that scores tokens.
  const panelsFor = (event) => {
    const monitors = Object.entries(bank.monitors).filter(([name]) => event.monitors && name in event.monitors);
    if (monitors.length) {
      return monitors.map(([name, monitor]) => {
        const labels = new Set(monitor.flag.map((label) => label.replace(/^[BIES]-/, ""))); // tags of a span have one name
        const about = `${[...labels].join(", ")}: ${rate(monitor)}`;
        return newPanel(name, monitor, about, ({ monitors: scores }) => scores?.[name] ?? null, name);
      });
    }
    return Object.entries(event.scores ?? {}).map(([task, labels]) => {
      const names = Object.keys(labels), label = names.filter((own) => own !== "O").at(-1) ?? names.at(-1);
      const bounded = bank.tasks[task].problem_type !== "regression";
      const about = bounded ? `probability of “${label}” at each token` : "value at each token";
      return newPanel(task, { threshold: null, bounded }, about, ({ scores }) => scores?.[task]?.[label] ?? null, null);
    });
  };
  const show = (event) => {
    if (!panels.length) {
      panels = panelsFor(event);
      if (!panels.length) panels = [newPanel("Text", { threshold: null, bounded: true }, "No reader of this bank scores single tokens.", () => null, null)];
      byId("written").replaceChildren(...panels.map((panel) => panel.card));
    }
    for (const panel of panels) panel.add(event);
  };

  // Writing

  const WHY = { length: "the limit of tokens is reached", eos_token: "the model ended it", stop_sequence: "a stop string came", flag: "a monitor flagged it" };
  const CHAT_WHY = { length: "length", stop: "eos_token", content_filter: "flag" };
  const ending = ({ details, choices }) => {
    const reason = details?.finish_reason ?? CHAT_WHY[choices?.[0]?.finish_reason];
    return reason ? WHY[reason] : "";
  };
  const tokens = (count) => `${count} token${count === 1 ? "" : "s"}`;
  const obstacle = () => {
    const temperature = Number(byId("temperature").value), limit = Number(byId("tokens").value);
    if (!byId("prompt").value.trim()) return "Type a prompt first.";
    if (!(limit >= 1) || !Number.isInteger(limit)) return "The number of tokens must be a whole number from 1 on.";
    return temperature >= 0 && temperature <= 2 && byId("temperature").value !== "" ? "" : "The temperature must be between 0 and 2.";
  };
  const write = async () => {
    running?.abort(); // a new prompt replaces the text that runs
    showProblem(obstacle());
    if (obstacle()) return;
    const text = (running = new AbortController()), began = performance.now();
    history.replaceState(null, "", `#${new URLSearchParams({ prompt: byId("prompt").value })}`);
    panels = [];
    byId("written").replaceChildren();
    byId("written").setAttribute("aria-busy", "true");
    byId("progress").textContent = "The model reads the prompt …";
    byId("halt").hidden = false;
    let count = 0, why = "", drift = {};
    try {
      const response = await post(request(), text.signal);
      for await (const event of events(response)) {
        if (running !== text) return; // events that had arrived before another text began
        why = ending(event) || why;
        drift = event.details?.drift ?? drift;
        if (!event.token) continue;
        count += 1;
        show(event);
        byId("progress").textContent = tokens(count);
      }
    } catch (error) {
      why = error.name === "AbortError" ? "you stopped it" : "an error came";
      if (error.name !== "AbortError" && running === text) showProblem(error.message);
    }
    if (running !== text) return; // another text has begun
    running = null;
    for (const panel of panels) panel.end(drift);
    const seconds = (performance.now() - began) / 1000;
    byId("progress").textContent = count ? `${tokens(count)} in ${seconds.toFixed(1)} s${why && `; it ends because ${why}`}.` : "";
    byId("written").setAttribute("aria-busy", "false");
    byId("halt").hidden = true;
  };
  byId("write").addEventListener("submit", (event) => {
    event.preventDefault();
    write();
  });
  byId("write").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("write").requestSubmit();
  });
  byId("halt").addEventListener("click", () => running?.abort());

  // Two modes: write a text, or have a finished one judged

  const choose = (mode) => {
    const isWriting = mode === "write";
    for (const button of byId("modes").children) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    for (const id of ["write", "written"]) byId(id).hidden = !isWriting;
    for (const id of ["ask", "answers"]) byId(id).hidden = isWriting;
    byId("readers").hidden = isWriting || byId("answers").children.length > 0;
    byId("timing").hidden = true;
    showProblem("");
    (isWriting ? byId("prompt") : byId("text")).focus();
  };
  for (const button of byId("modes").children) button.addEventListener("click", () => choose(button.dataset.mode));
  const begin = (info) => {
    bank = info;
    byId("modes").hidden = false;
    byId("as-chat").hidden = !bank.chats;
    byId("chat").checked = bank.chats;
    byId("tokens").max = bank.max_total_tokens;
    byId("stopping").hidden = !Object.values(bank.monitors).some((monitor) => monitor.threshold !== null);
    const chips = bank.examples.map((example) => {
      const prompt = [example].flat()[0]; // of a pair: a prompt and a reply
      const chip = make("button", { type: "button", title: prompt }, prompt);
      chip.addEventListener("click", () => {
        byId("prompt").value = prompt;
        write();
      });
      return chip;
    });
    byId("prompts").replaceChildren(...chips);
    byId("prompts").hidden = !chips.length;
    const fields = new URLSearchParams(location.hash.slice(1));
    if (fields.has("prompt")) byId("prompt").value = fields.get("prompt");
    choose(fields.has("text") ? "read" : "write");
  };
  return { begin, hide: () => ["write", "written", "modes"].forEach((id) => (byId(id).hidden = true)) };
};
