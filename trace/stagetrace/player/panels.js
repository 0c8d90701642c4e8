// Part 4 of 8: from a state to a picture. A Panels object owns one <section class="run"> and draws any moment of its recording.

const MAX_MESSAGES = 4; // pills on a wire; more are counted
const PIECES = ["computed", "chunk", "drafts", "missing"]; // of a running request's tokens
const MAX_ENDED = 12; // requests that ended and are still listed

class Panels {
  /** `seek(place of an event)` is what a click on an event asks for. */
  constructor(recording, index, seek) {
    this.recording = recording;
    this.root = document.getElementById("run-template").content.cloneNode(true).querySelector(".run");
    this.root.dataset.run = "AB"[index];
    this.only = -1; // the request that is shown alone
    this.away = new Set(); // parts that lie outside the window
    this.lanes = []; // process -> {lane, last, inside}
    this.#setUp();
    this.texts = new Items(this.find(".texts"));
    this.seenTexts = new Seen(this.find(".output"), (text) => this.#drawText(text));
    this.engines = this.#enginePanels();
    this.timeline = new RequestTimeline(recording, this.find(".timeline"), recording.firstScheduled, seek);
    this.chances = new ChancePanel(recording, this.find(".chances"), seek);
    this.events = new EventList(recording, this.find(".list"), this.find(".event"), seek);
    this.#watch();
  }

  #watch() {
    const observer = new IntersectionObserver((changes) => {
      for (const { target, isIntersecting } of changes) this.away[isIntersecting ? "delete" : "add"](target);
    });
    for (const part of this.root.querySelectorAll(".core, .output, .chances, .timeline, .detail")) observer.observe(part);
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  label(req) {
    return this.recording.label(req);
  }

  #setUp() {
    const { processes, meanings, nameWidth, title } = this.recording;
    this.find(".run-name").textContent = title;
    this.find(".run-name").dataset.letter = this.root.dataset.run;
    this.root.style.setProperty("--letters", nameWidth);
    const phase = (name, at) => make("li", { "data-phase": at + 1 }, make("b", {}, String(at + 1)), ` ${name}`);
    this.find(".phases").append(...PHASES.map(phase));
    const side = ({ isEngine, isWorker }) => (isEngine ? ".engines" : isWorker ? ".workers" : ".front");
    processes.forEach((process, number) => this.find(side(process)).append(this.#lane(process, number)));
    for (const part of [".clients", ".wire.http"]) this.find(part).hidden = !meanings.has("http.request");
    for (const part of [".wire.zmq", ".engines"]) this.find(part).hidden = !processes.some(({ isEngine }) => isEngine);
    for (const part of [".wire.steps", ".workers"]) this.find(part).hidden = !processes.some(({ isWorker }) => isWorker);
  }

  /** The scheduler and the cache of each engine; of a recording without one, those of nobody. */
  #enginePanels() {
    const { engines, processes } = this.recording;
    const sections = [this.find(".core")];
    while (sections.length < engines.length) {
      sections.push(sections[0].cloneNode(true));
      sections.at(-2).after(sections.at(-1));
    }
    return sections.map((section, place) => {
      const engine = engines[place] ?? 0;
      const { name, pid } = processes[engine];
      const again = engines.filter((one) => processes[one].name === name).length > 1 ? ` (${pid})` : "";
      return new EnginePanel(this, section, engine, name + again);
    });
  }

  #lane({ name, pid }, number) {
    const [last, inside] = ["last", "inside"].map((kind) => make("p", { class: kind }));
    const lane = make("div", { class: "lane", "data-process": number }, make("h2", {}, name), make("p", { class: "pid" }, `pid ${pid}`), last, inside);
    this.lanes[number] = { lane, last, inside };
    return lane;
  }

  /** Show the events of one request alone; -1: of all. */
  filter(only) {
    this.only = only;
    this.events.filter(only);
    this.timeline.filter((req) => this.isDim(req));
    this.find(".events .count").textContent = only < 0 ? "" : `of ${this.label(only)} alone: ${this.events.matching.length}`;
  }

  isDim(req) {
    return this.only >= 0 && req !== this.only;
  }

  chip(req, ...more) {
    const { id, label } = this.recording.requests[req];
    const attributes = { class: this.isDim(req) ? "chip dim" : "chip", "data-request": label, "data-id": id, title: id };
    return make("li", { ...attributes, "--hue": hue(req) }, make("b", {}, label), ...more);
  }

  /** Draw the moment just after the event at this place; without `whole` only what lies in the window. */
  draw(at, whole = true) {
    const state = this.recording.stateAt(at);
    const event = this.recording.events[at];
    const isDrawn = (part) => whole || !this.away.has(part);
    const engines = this.engines.filter(({ root }) => isDrawn(root));
    this.root.dataset.at = at;
    // the canvases first: to write on one, the browser computes the styles of all that was changed before
    if (isDrawn(this.find(".timeline"))) this.timeline.draw(at, state.engines.flatMap(({ running }) => running));
    for (const panel of engines) panel.drawBlocks(state, event, whole);
    this.#drawHead(state, event);
    this.#drawLanes(state, event);
    for (const panel of engines) panel.draw(state, event, whole);
    if (isDrawn(this.find(".output"))) this.#drawTexts(state);
    if (isDrawn(this.find(".chances"))) this.chances.draw(state, event, this.only);
    if (isDrawn(this.find(".detail"))) this.events.draw(at);
  }

  /** The step that an engine was in, or after, at an event: the event's own engine, its only one, or else the one that began a step last. */
  stepAt({ at, process }) {
    const { engines, steps } = this.recording;
    const engine = engines.includes(process) ? process : steps.findLast(({ start }) => start <= at)?.process ?? engines[0] ?? 0;
    const { step } = this.recording.stateAt(at).engines[engine];
    return step && engines.length > 1 ? `${step} of ${this.recording.processes[engine].name}` : step;
  }

  #drawHead(state, event) {
    const now = this.stepAt(event);
    const step = now ? `engine step ${now}` : "before the first engine step";
    const seconds = (event.us / 1e6).toFixed(3);
    this.find(".run-when").textContent = `event ${event.at + 1} of ${this.recording.events.length} · ${step} · ${seconds} s`;
    for (const item of this.find(".phases").children) {
      const lit = Number(item.dataset.phase) === event.phase;
      item.classList.toggle("lit", lit);
      if (lit) item.setAttribute("aria-current", "step");
      else item.removeAttribute("aria-current");
    }
    const rest = ` ${this.label(event.req)} — ${this.recording.meaning(event)}`;
    this.find(".sentence").replaceChildren(make("b", {}, event.name), rest);
  }

  /** With two runs: is this step the same in both, and what happened only here. */
  drawDifference(words, lines) {
    this.find(".run-same").hidden = false;
    this.find(".run-same").textContent = words;
    this.find(".only-here").hidden = lines.length === 0;
    this.find(".only-here ul").replaceChildren(...lines.map((line) => make("li", {}, line)));
  }

  // Processes and messages

  #drawLanes(state, event) {
    this.lanes.forEach(({ lane, last, inside }, number) => {
      const latest = this.recording.events[state.lastOf[number]];
      lane.classList.toggle("acting", number === event.process);
      lane.classList.toggle("dead", this.recording.processes[number].isEngine && Boolean(state.engines[number].dead));
      setText(last, latest ? this.recording.oneLine(latest) : "not started yet");
      setText(inside, this.#inside(state, this.recording.processes[number], number));
    });
    this.find(".wire.zmq .messages").replaceChildren(...this.#zmqMessages(state, event));
    this.find(".wire.steps .messages").replaceChildren(...this.#stepMessages(event));
    this.find(".wire.http .messages").replaceChildren(...this.#httpMessages(event));
    this.find(".clients .last").textContent = this.#clientLine(event);
  }

  #inside(state, { isEngine, isWorker, hasScheduler }, number) {
    const engine = state.engines[number];
    if (engine.dead && (isEngine || hasScheduler)) return this.deathOf(engine);
    if (isWorker) return (state.doing[number] ?? []).map((at) => this.#doing(this.recording.events[at])).join(" › ");
    const parts = [];
    const open = state.requests.filter((r) => r.status !== "unknown" && !r.answered).length;
    if (!isEngine && open) parts.push(`${counted(open, "request")} open`);
    const queues = `${engine.running.length} running, ${engine.waiting.length} waiting`;
    if (hasScheduler && engine.step) parts.push(`step ${engine.step}${engine.inStep ? "" : " is done"}: ${queues}`);
    return parts.join(" · ");
  }

  deathOf({ dead, deadAt }) {
    return `× dead: ${dead} Seen ${timeText(this.recording.events[deadAt].us)} after the start.`;
  }

  /** A span that a worker is in, in words. */
  #doing({ name, step, args }) {
    return name === "worker.collective" ? `${args.kind} of ${args.bytes} bytes` : `${name}${step >= 0 ? `, step ${step}` : ""}`;
  }

  /** Between an engine and its workers: what leaves or arrives with this event. */
  #stepMessages({ name, args, step, process }) {
    const worker = this.recording.processes[process].name;
    const text = {
      "executor.step_sent": `step ${step} → ${counted(args.workers, "worker")}`,
      "worker.step_received": `step ${step} → ${worker} ✓`,
      "worker.output_sent": `← tokens of step ${step}`,
      "executor.output_received": `← tokens of step ${step} ✓`,
    }[name];
    const motion = `${name.startsWith("executor.step") || name === "worker.step_received" ? "to-right" : "to-left"} ${/received$/.test(name) ? "arrives" : "leaves"}`;
    return text ? [make("span", { class: `pill ${motion}`, title: `${args.bytes} bytes` }, text)] : [];
  }

  #clientLine({ name, args, req }) {
    if (name === "http.request") return `${args.method} ${args.path}`;
    if (name === "sse.chunk") return `${this.label(req)} receives ${args.bytes} bytes`;
    return name === "http.response" ? `${this.label(req)} is answered: ${args.status}` : "over HTTP";
  }

  /** What arrives with this event, and what is on the way; a message never received is shown only when it is sent. */
  #zmqMessages(state, event) {
    const kept = state.inFlight.filter((at) => this.recording.received.has(at) || at === event.at);
    const arrived = /^zmq\..*_received$/.test(event.name) && event.cause >= 0 ? [event.cause] : [];
    const pills = [
      ...arrived.map((at) => this.#zmqPill(this.recording.events[at], event, "arrives")),
      ...kept.slice(-MAX_MESSAGES).map((at) => this.#zmqPill(this.recording.events[at], event, at === event.at ? "leaves" : "waits")),
    ];
    if (kept.length > MAX_MESSAGES) pills.push(make("span", { class: "more" }, `+ ${kept.length - MAX_MESSAGES} more`));
    return pills;
  }

  #zmqPill(sent, event, motion) {
    const toEngine = sent.name === "zmq.request_sent";
    const { type, num_outputs, bytes } = sent.args;
    const what = toEngine ? `${type} ${this.label(sent.req)} →` : `← step ${sent.step}: ${counted(num_outputs, "output")}`;
    const fate = motion === "arrives" ? " ✓" : this.recording.received.has(sent.at) ? "" : " × never received";
    const title = `sent ${timeText(event.us - sent.us)} ago, ${bytes} bytes`;
    return make("span", { class: `pill ${toEngine ? "to-right" : "to-left"} ${motion}`, "data-sent": sent.at, title }, what + fate);
  }

  #httpMessages({ name, args, req }) {
    const label = this.label(req);
    if (name === "http.request") return [make("span", { class: "pill to-right whole" }, `${args.method} ${label} →`)];
    if (name === "sse.chunk") return [make("span", { class: "pill to-left whole" }, `← chunk ${label}`)];
    return name === "http.response" ? [make("span", { class: "pill to-left whole" }, `← ${args.status} ${label}`)] : [];
  }

  /** The prompts and the outputs, if they were recorded. */
  #drawTexts(state) {
    const has = ({ askedFor, text, tokenIds }) => askedFor || text || tokenIds.length;
    const requests = state.requests.map((r, req) => [r, req]).filter(([r, req]) => has(r) && !this.isDim(req));
    this.find(".output").hidden = requests.length === 0;
    this.texts.draw(requests.map(([, req]) => [req, "", () => this.#text(req)]));
    this.shownRequests = state.requests;
    this.seenTexts.drawAll(requests.map(([, req]) => this.texts.known.get(req).element.lastChild));
  }

  #text(req) {
    const [prompt, answer] = ["prompt", "answer"].map((name) => make("span", { class: name }));
    const both = make("dd", {}, prompt, answer);
    Object.assign(both, { req, prompt, answer, look: "" });
    return make("div", {}, make("dt", {}, this.label(req)), both);
  }

  #drawText(both) {
    const { askedFor, text, tokenIds } = this.shownRequests[both.req];
    const look = `${askedFor.length} ${text.length} ${tokenIds.length}`;
    if (both.look === look) return;
    both.look = look;
    setText(both.prompt, askedFor);
    setText(both.answer, text || (tokenIds.length ? `token ids ${tokenIds.join(" ")}` : ""));
  }
}

/** One engine's scheduler and KV cache: a <div class="core"> of a run. */
class EnginePanel {
  /** `process`: the engine's; `name`: what it is called where there are several. */
  constructor(panels, root, process, name) {
    Object.assign(this, { panels, root, process, name });
    this.blocks = new BlockMap(panels.recording, this.find(".blocks"), process);
    this.waiting = new Items(this.find(".waiting .chips"));
    this.ended = new Items(this.find(".done"));
    this.rows = new Items(this.find(".rows"));
    this.seenRows = new Seen(this.find(".rows"), (row) => this.#drawRow(row));
    this.given = new Items(this.find(".budget"));
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  draw(state, event, whole) {
    const engine = state.engines[this.process];
    this.root.hidden = this.panels.engines.length > 1 && state.lastOf[this.process] === undefined; // it is started later
    this.root.classList.toggle("dead", Boolean(engine.dead));
    const whose = this.find(".whose");
    whose.hidden = this.panels.engines.length < 2 && !engine.dead;
    setText(whose, engine.dead ? `${this.name} ${this.panels.deathOf(engine)}` : this.name);
    this.#drawWaiting(state, engine);
    this.#drawEnded(state);
    this.#drawRunning(state, engine);
    if (whole && engine.running.includes(event.req)) requestAnimationFrame(() => this.#scrollTo(event.req));
    this.#drawCache(engine, event);
  }

  /** `entries` as Items takes them; who is dim has another look. */
  #fill(items, entries) {
    const nobody = [["nobody", "", () => make("li", { class: "nobody" }, "nobody")]];
    items.draw(entries.length ? entries.map(([req, look, create]) => [req, `${look} ${this.panels.isDim(req)}`, create]) : nobody);
  }

  #drawWaiting(state, engine) {
    setText(this.find(".waiting .count"), String(engine.waiting.length));
    const chip = (req) => {
      const { status, total, computed } = state.requests[req];
      const words = ` ${status === "preempted" ? "preempted, " : ""}lacks ${total - computed}`;
      return [req, words, () => this.panels.chip(req, words)];
    };
    this.#fill(this.waiting, engine.waiting.map(chip));
    const reason = this.find(".held-back");
    reason.hidden = engine.heldBack === null;
    reason.textContent = engine.heldBack === null ? "" : this.#reason(engine.heldBack);
  }

  #drawEnded(state) {
    const ended = state.requests.map((r, req) => [r, req]).filter(([r]) => r.status === "done" && r.engine === this.process).reverse();
    setText(this.find(".count-done"), String(ended.length));
    const words = (r) => ` ${r.reason}, ${counted(r.output, "token")}`;
    const chips = ended.slice(0, MAX_ENDED).map(([r, req]) => [req, words(r), () => this.panels.chip(req, words(r))]);
    const before = `and ${ended.length - MAX_ENDED} before`;
    if (ended.length > MAX_ENDED) chips.push(["before", before, () => make("li", { class: "nobody" }, before)]);
    this.#fill(this.ended, chips);
  }

  /** Why a request waits after this decision, in words. */
  #reason({ rule, first, behind, held, budget_left, free_blocks, num_running }) {
    const names = (ids) => ids.map((id) => this.panels.recording.labelOfId(id)).join(", ");
    const because = {
      budget: `the token budget of this step is used up (${budget_left} left)`,
      max_num_seqs: `${num_running} requests are running, the most allowed (max_num_seqs)`,
      blocks: `it needs more KV-cache blocks than the ${free_blocks} that are free`,
      no_chunking: `its prompt does not fit into the ${budget_left} tokens left, and chunked prefill is off`,
      hooks: "it would begin with an image, for which the encoder has no room in this step",
      preempted: "a request was just preempted, and none may overtake it",
    }[rule] ?? rule;
    const parts = first === null || !rule ? [] : [`${names([first])} is held back: ${because}.`];
    if (behind.length) parts.push(`Behind it: ${names(behind)}; nobody overtakes.`);
    if (held.length) parts.push(`Not prepared yet (a grammar, blocks from a folder): ${names(held)}.`);
    return parts.join(" ");
  }

  #drawRunning(state, engine) {
    const allowed = engine.maxSeqs ? ` of at most ${engine.maxSeqs}` : "";
    setText(this.find(".running .count"), engine.running.length + allowed);
    this.#drawBudget(state, engine);
    const most = Math.max(1, ...engine.running.map((req) => state.requests[req].total + state.requests[req].drafts));
    const longest = Math.ceil(most / 32) * 32; // a bar keeps its measure for some steps
    const rows = this.find(".rows");
    rows.classList.toggle("many", engine.running.length > 8); // one line each
    this.#fill(this.rows, engine.running.map((req) => [req, "", () => this.#runningRow(req)]));
    this.shown = { requests: state.requests, longest };
    this.seenRows.drawAll(engine.running.map((req) => this.rows.known.get(req).element));
  }

  #drawBudget(state, engine) {
    const tokens = (req) => state.requests[req].chunk + state.requests[req].drafts;
    const given = engine.running.filter((req) => tokens(req) > 0);
    const used = given.reduce((sum, req) => sum + tokens(req), 0);
    const text = engine.budget ? `Token budget: ${used} of ${engine.budget} given out in this step` : engine.dead ? "The scheduler is gone." : "The scheduler does not exist yet.";
    const bar = this.find(".budget");
    Object.assign(bar.dataset, { used, budget: engine.budget });
    bar.setAttribute("aria-label", text);
    this.find(".budget-text").textContent = text;
    this.given.draw(given.map((req) => [req, tokens(req), () => this.#budgetPart(req, tokens(req), tokens(req) / engine.budget)]));
  }

  #budgetPart(req, tokens, share) {
    const label = this.panels.label(req);
    return make("i", { "--hue": hue(req), "--share": share, title: `${label}: ${tokens}` }, share > 0.06 ? label : "");
  }

  #runningRow(req) {
    const pieces = PIECES.map((kind) => make("i", { class: kind, hidden: "" }));
    const tokens = make("div", { class: "tokens", role: "img" }, ...pieces);
    const [what, words, holds] = ["what", "words", "holds"].map((name) => make("span", { class: name }));
    const row = this.panels.chip(req, what, tokens, words, holds);
    row.req = req;
    row.parts = { pieces, what, tokens, words, holds };
    return row;
  }

  /** A row that is not seen is brought to the middle. */
  #scrollTo(req) {
    const row = this.rows.known.get(req)?.element, list = this.rows.parent;
    if (!row || list.scrollHeight <= list.clientHeight) return;
    const above = row.offsetTop - list.scrollTop;
    if (above < 0 || above + row.offsetHeight > list.clientHeight) list.scrollTop = row.offsetTop - list.clientHeight / 2;
  }

  /** A step changes every row a little: they are changed where they stand. */
  #drawRow(row) {
    const { longest } = this.shown, { req } = row, r = this.shown.requests[req];
    const counts = { computed: r.computed, chunk: r.chunk, drafts: r.drafts, missing: Math.max(0, r.total - r.computed - r.chunk), total: r.total, output: r.output };
    const look = `${r.status} ${Object.values(counts)} ${r.blocks.length} ${r.blocks.at(-1)} ${r.cachedTokens} ${r.preemptions} ${longest}`;
    if (row.look === look) return;
    row.look = look;
    for (const [name, value] of Object.entries(counts)) setAttribute(row, `data-${name}`, String(value));
    const { pieces, what, tokens, words, holds } = row.parts;
    const now = (r.chunk ? ` + ${r.chunk} now` : "") + (r.drafts ? ` + ${counted(r.drafts, "draft")}` : "");
    const text = `${r.computed} computed${now} of ${r.total}`;
    pieces.forEach((piece, k) => {
      const width = (100 * counts[PIECES[k]]) / longest;
      if (piece.width === width) return;
      piece.width = width;
      piece.hidden = width === 0;
      piece.style.width = `${width}%`;
    });
    setAttribute(tokens, "aria-label", `${text} tokens`);
    setText(what, r.status);
    setText(words, text);
    setText(holds, this.#holdsText(r));
    row.title = `${this.panels.recording.requests[req].id}: ${r.status}, ${this.#holdsText(r)}`;
  }

  #holdsText(r) {
    const shown = r.blocks.slice(0, 8).join(" ") + (r.blocks.length > 8 ? ` and ${r.blocks.length - 8} more` : "");
    const parts = [`${counted(r.output, "token")} out`, `blocks ${shown || "none"}`];
    if (r.cachedTokens) parts.push(`${r.cachedTokens} tokens from the prefix cache`);
    if (r.preemptions) parts.push(`preempted ${r.preemptions}×`);
    return parts.join(" · ");
  }

  drawBlocks(state, event, whole) {
    this.blocks.draw(state.engines[this.process], state.requests, this.#own(event), this.panels.only, whole);
  }

  /** The event, if it is of this engine. */
  #own(event) {
    return event.process === this.process ? event : { name: "", args: {} };
  }

  #drawCache(engine, event) {
    const own = this.#own(event);
    setText(this.find(".cache .count"), this.blocks.words(engine));
    const partial = this.find(".partial");
    partial.hidden = own.name !== "sched.output" || engine.freeRecorded === engine.usable - engine.held;
    partial.textContent = partial.hidden ? "" : `The scheduler says ${engine.freeRecorded} free: some events of blocks were not recorded.`;
  }
}
