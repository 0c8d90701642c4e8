// Part 2 of 4: from a state to a picture. A Panels object owns one <section class="run"> and draws any moment of its recording.
// Everything that comes from a recording enters the page as text, never as HTML.

const MAX_MESSAGES = 4; // pills on a wire; more are counted
const MAX_ENDED = 12; // requests that ended and are still listed

/** A DOM element: make("li", {class: "chip"}, "text", child, ...). Strings become text nodes, so nothing in them is ever markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const counted = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const hue = (req) => `var(--hue-${req % 7})`; // colours repeat: the name is what tells requests apart

function timeText(us) {
  return us < 1000 ? `${us} µs` : us < 1e6 ? `${(us / 1000).toFixed(3)} ms` : `${(us / 1e6).toFixed(6)} s`;
}

class Panels {
  /** `seek(place of an event)` is what a click on an event asks for. */
  constructor(recording, index, seek) {
    this.recording = recording;
    this.root = document.getElementById("run-template").content.cloneNode(true).querySelector(".run");
    this.root.dataset.run = "AB"[index];
    this.only = -1; // the request that is shown alone
    this.#setUp();
    this.engines = this.#enginePanels();
    this.timeline = new RequestTimeline(recording, this.find(".tracks"), seek);
    this.events = new EventList(recording, this.find(".list"), this.find(".event"), seek);
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
      section.querySelector(".whose").hidden = engines.length < 2;
      section.querySelector(".whose").textContent = name + again;
      return new EnginePanel(this, section, engine);
    });
  }

  #lane({ name, pid }, number) {
    const lines = ["pid", "last", "inside"].map((kind) => make("p", { class: kind }, kind === "pid" ? `pid ${pid}` : ""));
    return make("div", { class: "lane", "data-process": number }, make("h2", {}, name), ...lines);
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

  /** Draw the moment just after the event at this place. */
  draw(at) {
    const state = this.recording.stateAt(at);
    const event = this.recording.events[at];
    this.root.dataset.at = at;
    this.#drawHead(state, event);
    this.#drawLanes(state, event);
    for (const panel of this.engines) panel.draw(state, event);
    this.#drawTexts(state);
    this.timeline.draw(at);
    this.events.draw(at);
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
    for (const lane of this.root.querySelectorAll(".lane[data-process]")) {
      const number = Number(lane.dataset.process);
      const last = this.recording.events[state.lastOf[number]];
      lane.classList.toggle("acting", number === event.process);
      lane.querySelector(".last").textContent = last ? this.recording.oneLine(last) : "not started yet";
      lane.querySelector(".inside").textContent = this.#inside(state, this.recording.processes[number], number);
    }
    this.find(".wire.zmq .messages").replaceChildren(...this.#zmqMessages(state, event));
    this.find(".wire.steps .messages").replaceChildren(...this.#stepMessages(event));
    this.find(".wire.http .messages").replaceChildren(...this.#httpMessages(event));
    this.find(".clients .last").textContent = this.#clientLine(event);
  }

  #inside(state, { isEngine, isWorker, hasScheduler }, number) {
    const engine = state.engines[number];
    if (engine.dead && (isEngine || hasScheduler)) return `× ${engine.dead}`;
    if (isWorker) return (state.doing[number] ?? []).map((at) => this.#doing(this.recording.events[at])).join(" › ");
    const parts = [];
    const open = state.requests.filter((r) => r.status !== "unknown" && !r.answered).length;
    if (!isEngine && open) parts.push(`${counted(open, "request")} open`);
    const queues = `${engine.running.length} running, ${engine.waiting.length} waiting`;
    if (hasScheduler && engine.step) parts.push(`step ${engine.step}${engine.inStep ? "" : " is done"}: ${queues}`);
    return parts.join(" · ");
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
    this.find(".texts").replaceChildren(...requests.flatMap(([r, req]) => {
      const answer = r.text || (r.tokenIds.length ? `token ids ${r.tokenIds.join(" ")}` : "");
      const both = [make("span", { class: "prompt" }, r.askedFor), make("span", { class: "answer" }, answer)];
      return [make("dt", {}, this.label(req)), make("dd", {}, ...both)];
    }));
  }
}

/** One engine's scheduler and KV cache: a <div class="core"> of a run. */
class EnginePanel {
  /** `process`: the engine's. */
  constructor(panels, root, process) {
    Object.assign(this, { panels, root, process });
    this.blocks = new BlockMap(panels.recording, this.find(".blocks"), process);
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  draw(state, event) {
    const engine = state.engines[this.process];
    this.root.hidden = this.panels.engines.length > 1 && state.lastOf[this.process] === undefined; // it is started later
    this.#drawWaiting(state, engine);
    this.#drawEnded(state);
    this.#drawRunning(state, engine);
    this.#drawCache(state, engine, event);
  }

  #fill(selector, items) {
    this.find(selector).replaceChildren(...(items.length ? items : [make("li", { class: "nobody" }, "nobody")]));
  }

  #drawWaiting(state, engine) {
    this.find(".waiting .count").textContent = engine.waiting.length;
    const chip = (req) => {
      const { status, total, computed } = state.requests[req];
      return this.panels.chip(req, ` ${status === "preempted" ? "preempted, " : ""}lacks ${total - computed}`);
    };
    this.#fill(".waiting .chips", engine.waiting.map(chip));
    const reason = this.find(".held-back");
    reason.hidden = engine.heldBack === null;
    reason.textContent = engine.heldBack === null ? "" : this.#reason(engine.heldBack);
  }

  #drawEnded(state) {
    const ended = state.requests.map((r, req) => [r, req]).filter(([r]) => r.status === "done" && r.engine === this.process).reverse();
    this.find(".count-done").textContent = ended.length;
    const chips = ended.slice(0, MAX_ENDED).map(([r, req]) => this.panels.chip(req, ` ${r.reason}, ${counted(r.output, "token")}`));
    if (ended.length > MAX_ENDED) chips.push(make("li", { class: "nobody" }, `and ${ended.length - MAX_ENDED} before`));
    this.#fill(".done", chips);
  }

  /** Why a request waits after this decision, in words. */
  #reason({ rule, first, behind, held, budget_left, free_blocks, num_running }) {
    const names = (ids) => ids.map((id) => this.panels.recording.labelOfId(id)).join(", ");
    const because = {
      budget: `the token budget of this step is used up (${budget_left} left)`,
      max_num_seqs: `${num_running} requests are running, the most allowed (max_num_seqs)`,
      blocks: `it needs more KV-cache blocks than the ${free_blocks} that are free`,
      no_chunking: `its prompt does not fit into the ${budget_left} tokens left, and chunked prefill is off`,
      preempted: "a request was just preempted, and none may overtake it",
    }[rule] ?? rule;
    const parts = first === null || !rule ? [] : [`${names([first])} is held back: ${because}.`];
    if (behind.length) parts.push(`Behind it: ${names(behind)}; nobody overtakes.`);
    if (held.length) parts.push(`Not prepared yet (a grammar, blocks from a folder): ${names(held)}.`);
    return parts.join(" ");
  }

  #drawRunning(state, engine) {
    const most = engine.maxSeqs ? ` of at most ${engine.maxSeqs}` : "";
    this.find(".running .count").textContent = engine.running.length + most;
    this.#drawBudget(state, engine);
    const longest = Math.max(1, ...engine.running.map((req) => state.requests[req].total + state.requests[req].drafts));
    this.find(".rows").classList.toggle("many", engine.running.length > 8); // one line each
    this.#fill(".rows", engine.running.map((req) => this.#runningRow(req, state.requests[req], longest)));
  }

  #drawBudget(state, engine) {
    const tokens = (req) => state.requests[req].chunk + state.requests[req].drafts;
    const given = engine.running.filter((req) => tokens(req) > 0);
    const used = given.reduce((sum, req) => sum + tokens(req), 0);
    const text = engine.budget ? `Token budget: ${used} of ${engine.budget} given out in this step` : "The scheduler does not exist yet.";
    const bar = this.find(".budget");
    Object.assign(bar.dataset, { used, budget: engine.budget });
    bar.setAttribute("aria-label", text);
    this.find(".budget-text").textContent = text;
    bar.replaceChildren(...given.map((req) => this.#budgetPart(req, tokens(req), tokens(req) / engine.budget)));
  }

  #budgetPart(req, tokens, share) {
    const label = this.panels.label(req);
    return make("i", { "--hue": hue(req), "--share": share, title: `${label}: ${tokens}` }, share > 0.06 ? label : "");
  }

  #runningRow(req, r, longest) {
    const parts = { computed: r.computed, chunk: r.chunk, drafts: r.drafts, missing: Math.max(0, r.total - r.computed - r.chunk) };
    const now = (r.chunk ? ` + ${r.chunk} now` : "") + (r.drafts ? ` + ${counted(r.drafts, "draft")}` : "");
    const words = `${r.computed} computed${now} of ${r.total}`;
    const pieces = Object.entries(parts).filter(([, n]) => n).map(([kind, n]) => make("i", { class: kind, "--share": n / longest }));
    const row = this.panels.chip(
      req,
      make("span", { class: "what" }, r.status),
      make("div", { class: "tokens", role: "img", "aria-label": `${words} tokens` }, ...pieces),
      make("span", { class: "words" }, words),
      make("span", { class: "holds" }, this.#holdsText(r)),
    );
    row.title += `: ${r.status}, ${this.#holdsText(r)}`;
    Object.assign(row.dataset, parts, { total: r.total, output: r.output });
    return row;
  }

  #holdsText(r) {
    const shown = r.blocks.slice(0, 8).join(" ") + (r.blocks.length > 8 ? ` and ${r.blocks.length - 8} more` : "");
    const parts = [`${counted(r.output, "token")} out`, `blocks ${shown || "none"}`];
    if (r.cachedTokens) parts.push(`${r.cachedTokens} tokens from the prefix cache`);
    if (r.preemptions) parts.push(`preempted ${r.preemptions}×`);
    return parts.join(" · ");
  }

  #drawCache(state, engine, event) {
    const own = event.process === this.process ? event : { name: "", args: {} };
    this.blocks.draw(engine, state.requests, own, this.panels.only);
    this.find(".cache .count").textContent = this.blocks.words(engine);
    const partial = this.find(".partial");
    partial.hidden = own.name !== "sched.output" || engine.freeRecorded === engine.usable - engine.held;
    partial.textContent = partial.hidden ? "" : `The scheduler says ${engine.freeRecorded} free: some events of blocks were not recorded.`;
  }
}
