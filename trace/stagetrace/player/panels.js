// Part 2 of 3: from a state to a picture. A Panels object owns one <section class="run"> and draws any moment of its recording.
// Everything that comes from a recording enters the page as text, never as HTML.

const EVENTS_BEFORE = 7, EVENTS_AFTER = 12; // rows of the event list around the current one
const MAX_CELLS = 2048; // blocks that are drawn one by one
const MAX_MESSAGES = 4; // pills on a wire; more are counted
const STATUS_WORDS = { unknown: "not seen yet", api: "in the API server", waiting: "waiting", prefill: "prefill", decode: "decode", preempted: "preempted", done: "ended" };

/** A DOM element: make("li", {class: "chip"}, "text", child, ...). Strings become text nodes, so nothing in them is ever markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const counted = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

function timeText(us) {
  return us < 1000 ? `${us} µs` : us < 1e6 ? `${(us / 1000).toFixed(3)} ms` : `${(us / 1e6).toFixed(6)} s`;
}

class Panels {
  constructor(recording, index, seek) {
    this.recording = recording;
    this.seek = seek; // (place of an event) => void: what a click on an event asks for
    this.root = document.getElementById("run-template").content.cloneNode(true).querySelector(".run");
    this.root.dataset.run = "AB"[index];
    this.find = (selector) => this.root.querySelector(selector);
    this.only = -1; // the request that is shown alone
    this.matching = recording.events.map((event) => event.at);
    this.#setUp();
  }

  #setUp() {
    const { recording } = this;
    this.find(".run-name").textContent = recording.title;
    this.find(".run-name").dataset.letter = this.root.dataset.run;
    this.find(".phases").append(...PHASES.map((name, at) => make("li", { "data-phase": at + 1 }, make("b", {}, String(at + 1)), ` ${name}`)));
    for (const [number, process] of recording.processes.entries()) {
      const lane = make("div", { class: "lane", "data-process": number }, make("h2", {}, process.name), make("p", { class: "pid" }, `pid ${process.pid}`), make("p", { class: "last" }), make("p", { class: "inside" }));
      this.find(process.isEngine ? ".engines" : ".front").append(lane);
    }
    const names = new Set(recording.meanings.keys());
    const hasHttp = names.has("http.request"), hasEngine = recording.processes.some((process) => process.isEngine);
    for (const part of [".clients", ".wire.http"]) this.find(part).hidden = !hasHttp;
    for (const part of [".wire.zmq", ".engines"]) this.find(part).hidden = !hasEngine;
    this.#setUpBlocks();
    this.#setUpTimeline();
  }

  /** Show the events of one request alone; -1: of all. */
  filter(only) {
    this.only = only;
    this.matching = this.recording.events.filter((event) => only < 0 || event.req === only).map((event) => event.at);
    for (const row of this.root.querySelectorAll(".tracks .row")) row.classList.toggle("dim", this.#isDim(Number(row.dataset.request)));
  }

  #isDim(req) {
    return this.only >= 0 && req !== this.only;
  }

  /** A request's name with its colour, which repeats: the name is what tells requests apart. */
  chip(req, ...more) {
    const classes = this.#isDim(req) ? "chip dim" : "chip";
    return make("li", { class: classes, "data-request": this.recording.label(req), "data-id": this.recording.requests[req].id, "--hue": `var(--hue-${req % 8})`, title: this.recording.requests[req].id }, make("b", {}, this.recording.label(req)), ...more);
  }

  /** Draw the moment just after the event at this place. */
  draw(at) {
    const state = this.recording.stateAt(at);
    const event = this.recording.events[at];
    this.root.dataset.at = at;
    this.#drawHead(state, event);
    this.#drawLanes(state, event);
    this.#drawWaiting(state);
    this.#drawRunning(state);
    this.#drawBlocks(state, event);
    this.#drawOutput(state);
    this.#drawEvents(at);
    this.#drawEvent(event);
    this.find(".tracks").style.setProperty("--at", this.#share(at));
  }

  #drawHead(state, event) {
    const { events } = this.recording;
    this.find(".run-when").textContent = `event ${event.at + 1} of ${events.length} · ${state.step ? `engine step ${state.step}` : "before the first engine step"} · ${(event.us / 1e6).toFixed(3)} s`;
    for (const item of this.find(".phases").children) {
      const lit = Number(item.dataset.phase) === event.phase;
      item.classList.toggle("lit", lit);
      if (lit) item.setAttribute("aria-current", "step");
      else item.removeAttribute("aria-current");
    }
    this.find(".sentence").replaceChildren(make("b", {}, event.name), event.req >= 0 ? ` ${this.recording.label(event.req)}` : "", ` — ${this.meaning(event)}`);
  }

  meaning(event) {
    const span = { B: "Begins. ", E: "Ends. ", i: "" }[event.ph];
    return span + (this.recording.meanings.get(event.name).meaning || "Not in the vocabulary of this version.");
  }

  /** With two runs: is this step the same in both, and what happened only here. */
  drawDifference(words, lines) {
    const same = this.find(".run-same");
    same.hidden = false;
    same.textContent = words;
    const box = this.find(".only-here");
    box.hidden = lines.length === 0;
    this.find(".only-here ul").replaceChildren(...lines.map((line) => make("li", {}, line)));
  }

  // Processes and messages

  #drawLanes(state, event) {
    for (const lane of this.root.querySelectorAll(".lane[data-process]")) {
      const number = Number(lane.dataset.process);
      const last = state.lastOf[number];
      lane.classList.toggle("acting", number === event.process);
      lane.querySelector(".last").textContent = last === undefined ? "not started yet" : this.#oneLine(this.recording.events[last]);
      lane.querySelector(".inside").textContent = this.#inside(state, this.recording.processes[number]);
    }
    this.find(".wire.zmq .messages").replaceChildren(...this.#zmqMessages(state, event));
    this.find(".wire.http .messages").replaceChildren(...this.#httpMessages(event));
    this.find(".clients .last").textContent = this.#clientLine(event);
  }

  #oneLine(event) {
    return [event.name, { B: "begins", E: "ends", i: "" }[event.ph], this.recording.label(event.req)].filter(Boolean).join(" ");
  }

  #inside(state, process) {
    const parts = [];
    const open = state.requests.filter((r) => r.status !== "unknown" && !r.answered).length;
    if (!process.isEngine && open) parts.push(`${counted(open, "request")} open`);
    if (process.hasScheduler && state.step) parts.push(`step ${state.step}${state.inStep ? "" : " is done"}: ${state.running.length} running, ${state.waiting.length} waiting`);
    if ((process.isEngine || process.hasScheduler) && state.engineDead) return `× ${state.engineDead}`;
    return parts.join(" · ");
  }

  #clientLine(event) {
    if (event.name === "http.request") return `${event.args.method} ${event.args.path}`;
    if (event.name === "sse.chunk") return `${this.recording.label(event.req)} receives ${event.args.bytes} bytes`;
    return event.name === "http.response" ? `${this.recording.label(event.req)} is answered: ${event.args.status}` : "over HTTP";
  }

  /** What is on the way, what arrives with this event, and what was sent to nobody. */
  #zmqMessages(state, event) {
    const kept = state.inFlight.filter((at) => this.recording.received.has(at) || at === event.at);
    const arrived = /^zmq\..*_received$/.test(event.name) && event.cause >= 0 ? [event.cause] : [];
    const shown = [...arrived, ...kept.slice(-MAX_MESSAGES)];
    const pills = shown.map((at) => this.#zmqPill(this.recording.events[at], event, arrived.includes(at)));
    if (kept.length > MAX_MESSAGES) pills.push(make("span", { class: "more" }, `+ ${kept.length - MAX_MESSAGES} more`));
    return pills;
  }

  #zmqPill(sent, event, arrives) {
    const toEngine = sent.name === "zmq.request_sent";
    const what = toEngine ? `${sent.args.type} ${this.recording.label(sent.req)}` : `step ${sent.step}: ${counted(sent.args.num_outputs, "output")}`;
    const lost = this.recording.received.has(sent.at) ? "" : " × never received";
    const motion = arrives ? "arrives" : sent.at === event.at ? "leaves" : "waits";
    const title = `sent ${timeText(event.us - sent.us)} ago, ${sent.args.bytes} bytes`;
    return make("span", { class: `pill ${toEngine ? "to-right" : "to-left"} ${motion}`, "data-sent": sent.at, "data-motion": motion, title }, (toEngine ? "" : "← ") + what + lost + (toEngine ? " →" : "") + (arrives ? " ✓" : ""));
  }

  #httpMessages(event) {
    const label = this.recording.label(event.req);
    if (event.name === "http.request") return [make("span", { class: "pill to-right whole" }, `${event.args.method} ${label} →`)];
    if (event.name === "sse.chunk") return [make("span", { class: "pill to-left whole" }, `← chunk ${label}`)];
    return event.name === "http.response" ? [make("span", { class: "pill to-left whole" }, `← ${event.args.status} ${label}`)] : [];
  }

  // The scheduler

  #drawWaiting(state) {
    this.find(".waiting .count").textContent = state.waiting.length;
    const items = state.waiting.map((req) => {
      const r = state.requests[req];
      return this.chip(req, ` ${r.status === "preempted" ? "preempted, " : ""}lacks ${r.total - r.computed}`);
    });
    this.find(".waiting .chips").replaceChildren(...(items.length ? items : [make("li", { class: "nobody" }, "nobody")]));
    const reason = this.find(".held-back");
    reason.hidden = state.heldBack === null;
    reason.textContent = state.heldBack === null ? "" : this.#reason(state);
    const ended = state.requests.map((r, req) => [r, req]).filter(([r]) => r.status === "done").reverse();
    this.find(".count-done").textContent = ended.length;
    this.find(".done").replaceChildren(...ended.slice(0, 12).map(([r, req]) => this.chip(req, ` ${r.reason}, ${r.output} tokens`)), ended.length > 12 ? make("li", { class: "nobody" }, `and ${ended.length - 12} before`) : "");
  }

  /** Why somebody waits after this decision, in words. */
  #reason(state) {
    const { rule, first, behind, grammar, budget_left, free_blocks, num_running } = state.heldBack;
    const label = (id) => this.recording.labelOfId(id);
    const because = {
      budget: `the token budget of this step is used up (${budget_left} left)`,
      max_num_seqs: `${num_running} requests run already, and no more may (max_num_seqs)`,
      blocks: `it needs more KV-cache blocks than the ${free_blocks} that are free`,
      no_chunking: `its prompt does not fit into the ${budget_left} tokens left, and chunked prefill is off`,
      preempted: "somebody was just preempted, and nobody may overtake",
    }[rule] ?? rule;
    const parts = first === null || !rule ? [] : [`${label(first)} is held back: ${because}.`];
    if (behind?.length) parts.push(`Behind it: ${behind.map(label).join(", ")}; nobody overtakes.`);
    if (grammar?.length) parts.push(`Waiting for a grammar: ${grammar.map(label).join(", ")}.`);
    return parts.join(" ");
  }

  #drawRunning(state) {
    this.find(".running .count").textContent = state.maxSeqs ? `${state.running.length} of at most ${state.maxSeqs}` : state.running.length;
    this.#drawBudget(state);
    const longest = Math.max(1, ...state.running.map((req) => state.requests[req].total + state.requests[req].drafts));
    const rows = state.running.map((req) => this.#runningRow(req, state.requests[req], longest));
    this.find(".running .rows").classList.toggle("many", rows.length > 8); // one line each
    this.find(".running .rows").replaceChildren(...(rows.length ? rows : [make("li", { class: "nobody" }, "nobody")]));
  }

  #drawBudget(state) {
    const given = state.running.map((req) => [req, state.requests[req].chunk + state.requests[req].drafts]).filter(([, tokens]) => tokens > 0);
    const used = given.reduce((sum, [, tokens]) => sum + tokens, 0);
    const text = state.budget === 0 ? "The scheduler does not exist yet." : `Token budget: ${used} of ${state.budget} given out in this step`;
    const bar = this.find(".budget");
    bar.dataset.used = used;
    bar.dataset.budget = state.budget;
    bar.setAttribute("aria-label", text);
    this.find(".budget-text").textContent = text;
    bar.replaceChildren(...given.map(([req, tokens]) => make("i", { "--hue": `var(--hue-${req % 8})`, "--share": tokens / state.budget, title: `${this.recording.label(req)}: ${tokens}` }, tokens / state.budget > 0.06 ? this.recording.label(req) : "")));
  }

  #runningRow(req, r, longest) {
    const missing = Math.max(0, r.total - r.computed - r.chunk);
    const parts = { computed: r.computed, chunk: r.chunk, drafts: r.drafts, missing };
    const words = [`${r.computed} computed`, r.chunk ? `+ ${r.chunk} now` : "", r.drafts ? `+ ${counted(r.drafts, "draft")}` : "", `of ${r.total}`].filter(Boolean).join(" ");
    const bar = make("div", { class: "tokens", role: "img", "aria-label": `${words} tokens` }, ...Object.entries(parts).filter(([, n]) => n).map(([kind, n]) => make("i", { class: kind, "--share": n / longest })));
    const row = this.chip(req, make("span", { class: "what" }, r.status), bar, make("span", { class: "words" }, words), make("span", { class: "holds" }, this.#holdsText(r)));
    row.title += `: ${r.status}, ${this.#holdsText(r)}`;
    for (const [kind, n] of Object.entries({ ...parts, total: r.total, output: r.output })) row.dataset[kind] = n;
    return row;
  }

  #holdsText(r) {
    const shown = r.blocks.slice(0, 8).join(" ") + (r.blocks.length > 8 ? ` and ${r.blocks.length - 8} more` : "");
    const parts = [`${counted(r.output, "token")} out`, `blocks ${shown || "none"}`];
    if (r.cachedTokens) parts.push(`${r.cachedTokens} tokens from the prefix cache`);
    if (r.preemptions) parts.push(`preempted ${r.preemptions}×`);
    return parts.join(" · ");
  }

  // The KV cache: one cell per block, and only cells that changed are touched

  #setUpBlocks() {
    const last = this.recording.stateAt(this.recording.events.length - 1);
    const count = Math.min(Math.max(last.usable + 1, this.recording.numBlocks), MAX_CELLS);
    this.cells = Array.from({ length: count }, (_, id) => make("span", { "data-block": id }, make("small", {}, String(id)), make("b")));
    this.looks = [];
    const map = this.find(".blocks");
    map.classList.toggle("dense", count > 256);
    this.letters = Math.min(8, Math.max(2, ...this.recording.requests.map(({ label }) => label.length))); // that fit into a cell
    this.root.style.setProperty("--cell", `${Math.max(36, this.letters * 8 + 8)}px`);
    this.root.style.setProperty("--who", `${this.letters * 8}px`);
    map.append(...this.cells);
    if (last.usable >= count) this.find(".cache h2").append(make("span", { class: "caption" }, ` (the first ${count} of ${last.usable + 1} are drawn)`));
  }

  #drawBlocks(state, event) {
    const free = state.usable - state.held;
    const text = state.usable ? `${free} of ${state.usable} free` : "not allocated yet";
    this.find(".cache .count").textContent = text;
    const changed = new Set([...(event.args.blocks ?? []), ...(event.args.new_blocks ?? []), event.name === "kv.evicted" ? event.args.block : -1]);
    this.cells.forEach((cell, id) => this.#drawBlock(cell, id, state, changed.has(id)));
    const map = this.find(".blocks");
    map.dataset.free = free;
    map.setAttribute("aria-label", `${text}. ${state.running.map((req) => `${this.recording.label(req)} holds ${state.requests[req].blocks.join(", ") || "none"}`).join("; ")}`);
    const partial = this.find(".partial");
    partial.hidden = !(state.decided && event.name === "sched.output" && state.freeRecorded !== free);
    partial.textContent = partial.hidden ? "" : `The scheduler says that ${state.freeRecorded} are free: this recording does not hold every event of a block.`;
  }

  /** The end of a name that is too long for a cell: what tells names apart is more often there. */
  #cut(name) {
    return name.length > this.letters ? `…${name.slice(1 - this.letters)}` : name;
  }

  #drawBlock(cell, id, state, changed) {
    const { holders = [], cached = false } = state.blocks[id] ?? {};
    const dim = holders.length > 0 && this.only >= 0 && !holders.includes(this.only);
    const look = `${holders.join(",")}/${cached}/${changed}/${dim}/${state.usable > 0}`;
    if (this.looks[id] === look) return;
    this.looks[id] = look;
    const kind = id === 0 ? "b-null" : holders.length ? "b-held" : "b-free";
    cell.className = ["block", kind, cached ? "b-cached" : "", changed ? "changed" : "", dim ? "dim" : ""].filter(Boolean).join(" ");
    cell.style.setProperty("--hue", holders.length ? `var(--hue-${holders[0] % 8})` : "transparent");
    const names = holders.map((req) => this.recording.label(req));
    cell.lastChild.textContent = id === 0 ? "–" : names.length > 1 ? `${names.length}×` : names.length ? this.#cut(names[0]) : cached ? "c" : "";
    cell.dataset.holders = names.join(" ");
    cell.title = `block ${id}: ${id === 0 ? "padding, never given away" : names.length ? `held by ${names.join(", ")}` : "free"}${cached ? ", in the prefix cache" : ""}`;
  }

  // Output, if it was recorded

  #drawOutput(state) {
    const withOutput = state.requests.map((r, req) => [r, req]).filter(([r, req]) => (r.askedFor || r.text || r.tokenIds.length) && !this.#isDim(req));
    this.find(".output").hidden = withOutput.length === 0;
    this.find(".texts").replaceChildren(...withOutput.flatMap(([r, req]) => [make("dt", {}, this.recording.label(req)), make("dd", { "data-request": this.recording.label(req) }, make("span", { class: "prompt" }, r.askedFor), make("span", { class: "answer" }, r.text || (r.tokenIds.length ? `token ids ${r.tokenIds.join(" ")}` : "")))]));
  }

  // Requests over time

  #share(at) {
    return at / Math.max(1, this.recording.events.length - 1);
  }

  #setUpTimeline() {
    const box = this.find(".tracks");
    box.append(make("div", { class: "cursor" }));
    for (const [req, spans] of this.recording.spans.entries()) {
      if (!spans.some(({ status }) => status === "waiting" || status === "api")) continue;
      const track = make("div", { class: "line" });
      spans.forEach((span, k) => {
        const end = spans[k + 1]?.start ?? this.recording.events.length - 1;
        if (span.status === "done" || span.status === "unknown") return;
        track.append(make("i", { class: `t-${span.status}`, "--from": this.#share(span.start), "--to": this.#share(end), title: `${this.recording.label(req)}: ${STATUS_WORDS[span.status]}, events ${span.start + 1} to ${end + 1}` }));
      });
      box.append(make("div", { class: "row", "data-request": req }, make("span", { class: "who" }, this.recording.label(req)), track));
    }
    box.setAttribute("aria-label", "When each request waited, was in prefill, decoded or was preempted; the line is now");
    box.addEventListener("click", (click) => {
      const line = box.querySelector(".line")?.getBoundingClientRect();
      if (line) this.seek(Math.round(Math.min(1, Math.max(0, (click.clientX - line.left) / line.width)) * (this.recording.events.length - 1)));
    });
  }

  // Events

  #drawEvents(at) {
    const { matching } = this;
    let here = matching.findIndex((one) => one >= at); // the current event, or the next one that is shown
    if (here < 0) here = matching.length;
    const first = Math.max(0, Math.min(here - EVENTS_BEFORE, matching.length - EVENTS_BEFORE - EVENTS_AFTER));
    const shown = matching.slice(first, first + EVENTS_BEFORE + EVENTS_AFTER);
    this.find(".events .count").textContent = this.only < 0 ? "" : `of ${this.recording.label(this.only)} alone: ${matching.length}`;
    this.find(".events .list").replaceChildren(...shown.map((one) => this.#eventRow(this.recording.events[one], at)));
  }

  #eventRow(event, at) {
    const now = event.at === at;
    const ph = { B: " ⟨ begins", E: " ⟩ ends", i: "" }[event.ph];
    const button = make("button", { type: "button", "data-at": event.at, class: now ? "now" : "", "aria-current": now ? "true" : null, tabindex: now ? 0 : -1 },
      make("span", { class: "mark" }, now ? "▶" : ""), make("span", { class: "phase-number", title: PHASES[event.phase - 1] ?? "" }, event.phase || "–"),
      make("span", { class: "process" }, this.recording.processes[event.process].name.replace(/_DP\d+$/, "")),
      make("span", { class: "name" }, event.name + ph), make("span", { class: "who" }, this.recording.label(event.req)));
    button.addEventListener("click", () => this.seek(event.at));
    return make("li", {}, button);
  }

  #drawEvent(event) {
    const { recording } = this;
    this.find(".event-name").textContent = this.#oneLine(event);
    this.find(".meaning").textContent = this.meaning(event);
    const { vllm, stage } = recording.meanings.get(event.name);
    const facts = [["in vLLM", vllm], ["here", [stage, event.source].filter(Boolean).join(" · ")], ["process", `${recording.processes[event.process].name}, ${timeText(event.us)} after the start`]];
    if (event.req >= 0) facts.push(["request", `${recording.label(event.req)} = ${recording.requests[event.req].id}, ${STATUS_WORDS[recording.current.requests[event.req].status]}`]);
    for (const [name, value] of Object.entries(event.args)) facts.push([name, typeof value === "string" ? value : JSON.stringify(value)]);
    const pairs = facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]);
    if (event.cause >= 0) pairs.push(make("dt", {}, "caused by"), make("dd", {}, this.#link(event.cause)));
    for (const at of (recording.effects.get(event.at) ?? []).slice(0, 3)) pairs.push(make("dt", {}, "causes"), make("dd", {}, this.#link(at)));
    this.find(".facts").replaceChildren(...pairs);
  }

  #link(at) {
    const event = this.recording.events[at];
    const button = make("button", { type: "button", class: "link" }, `${this.#oneLine(event)} in ${this.recording.processes[event.process].name}, event ${at + 1}`);
    button.addEventListener("click", () => this.seek(at));
    return button;
  }
}
