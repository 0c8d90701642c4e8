// Part 3 of 4: the lower half of a run's picture: the block map, the requests over time, and the events. Each is a small class that draws
// itself into one element, given a state or the place of an event.

const MAX_CELLS = 4096; // blocks that are drawn one by one
const EVENTS_BEFORE = 7, EVENTS_AFTER = 12; // rows of the event list around the current one
const STATUS_WORDS = {
  unknown: "not seen yet", api: "in the API server", waiting: "waiting", prefill: "prefill", decode: "decode", preempted: "preempted",
  done: "ended",
};

/** The KV cache: one cell per block, and only cells that look different from before are touched. */
class BlockMap {
  /** `engine`: its process. */
  constructor(recording, element, engine) {
    this.recording = recording;
    this.element = element;
    const last = recording.stateAt(recording.events.length - 1).engines[engine];
    this.total = Math.max(last.usable + 1, recording.numBlocks[engine]);
    const count = Math.min(this.total, MAX_CELLS);
    this.cells = Array.from({ length: count }, (_, id) => make("span", { "data-block": id }, make("small", {}, String(id)), make("b")));
    this.looks = [];
    element.classList.toggle("dense", count > 256);
    element.append(...this.cells);
  }

  /** `engine`: its state; `event` is its own. */
  draw(engine, requests, event, only) {
    const { args } = event;
    const named = [...(args.blocks ?? []), ...(args.new_blocks ?? []), event.name === "kv.evicted" ? args.block : -1];
    const changed = new Set(named);
    this.cells.forEach((cell, id) => this.#drawCell(cell, id, engine, changed.has(id), only));
    this.element.dataset.free = engine.usable - engine.held;
    const holdings = engine.running.map((req) => `${this.recording.label(req)} holds ${requests[req].blocks.join(", ") || "none"}`);
    this.element.setAttribute("aria-label", `${this.words(engine)}. ${holdings.join("; ")}`);
  }

  words(engine) {
    if (engine.usable === 0) return "not allocated yet";
    const drawn = this.total > this.cells.length ? `, the first ${this.cells.length} are drawn` : "";
    return `${engine.usable - engine.held} of ${engine.usable} free${drawn}`;
  }

  #drawCell(cell, id, engine, changed, only) {
    const { holders = [], cached = false } = engine.blocks[id] ?? {};
    const dim = holders.length > 0 && only >= 0 && !holders.includes(only);
    const look = `${holders.join(",")}/${cached}/${changed}/${dim}`;
    if (this.looks[id] === look) return;
    this.looks[id] = look;
    const names = holders.map((req) => this.recording.label(req));
    const kind = id === 0 ? "b-null" : holders.length ? "b-held" : "b-free";
    cell.className = ["block", kind, cached && "b-cached", changed && "changed", dim && "dim"].filter(Boolean).join(" ");
    cell.style.setProperty("--hue", holders.length ? hue(holders[0]) : "transparent");
    cell.dataset.holders = names.join(" ");
    cell.lastChild.textContent = id === 0 ? "–" : this.#sign(names, cached);
    const held = names.length ? `held by ${names.join(", ")}` : id === 0 ? "padding, never given away" : "free";
    cell.title = `block ${id}: ${held}${cached ? ", in the prefix cache" : ""}`;
  }

  /** The text of a cell. Of a name that is too long, the end: names differ there more often. */
  #sign(names, cached) {
    if (names.length === 0) return cached ? "c" : "";
    if (names.length > 1) return `${names.length}×`;
    const room = this.recording.nameWidth;
    return names[0].length > room ? `…${names[0].slice(1 - room)}` : names[0];
  }
}

/** A bar per request that shows when it waited, was in prefill, decoded or was preempted. One tick is one event. */
class RequestTimeline {
  constructor(recording, element, seek) {
    this.recording = recording;
    this.element = element;
    const seen = ({ status }) => status === "waiting" || status === "api";
    const rows = recording.spans.map((spans, req) => (spans.some(seen) ? this.#row(spans, req) : null)).filter(Boolean);
    element.append(make("div", { class: "cursor" }), ...rows);
    element.addEventListener("click", (click) => {
      const line = element.querySelector(".line")?.getBoundingClientRect();
      if (line) seek(Math.round(Math.min(1, Math.max(0, (click.clientX - line.left) / line.width)) * (recording.events.length - 1)));
    });
  }

  draw(at) {
    this.element.style.setProperty("--at", this.#share(at));
  }

  filter(isDim) {
    for (const row of this.element.querySelectorAll(".row")) row.classList.toggle("dim", isDim(Number(row.dataset.request)));
  }

  #share(at) {
    return at / Math.max(1, this.recording.events.length - 1);
  }

  #row(spans, req) {
    const label = this.recording.label(req);
    const bars = spans.map(({ start, status }, k) => {
      const end = spans[k + 1]?.start ?? this.recording.events.length - 1;
      const title = `${label}: ${STATUS_WORDS[status]}, events ${start + 1} to ${end + 1}`;
      return make("i", { class: `t-${status}`, "--from": this.#share(start), "--to": this.#share(end), title });
    });
    const parts = [make("span", { class: "who" }, label), make("div", { class: "line" }, ...bars)];
    return make("div", { class: "row", "data-request": req }, ...parts);
  }
}

/** The events around the current one, and what is known about the current one. */
class EventList {
  constructor(recording, list, event, seek) {
    Object.assign(this, { recording, list, event, seek });
    this.filter(-1);
  }

  /** List the events of one request alone; -1: of all. */
  filter(only) {
    this.matching = this.recording.events.filter((event) => only < 0 || event.req === only).map((event) => event.at);
  }

  draw(at) {
    const { matching } = this;
    const found = matching.findIndex((one) => one >= at); // the current event, or the next one that is listed
    const here = found < 0 ? matching.length : found;
    const first = Math.max(0, Math.min(here - EVENTS_BEFORE, matching.length - EVENTS_BEFORE - EVENTS_AFTER));
    const shown = matching.slice(first, first + EVENTS_BEFORE + EVENTS_AFTER);
    this.list.replaceChildren(...shown.map((one) => make("li", {}, this.#row(this.recording.events[one], one === at))));
    this.#drawEvent(this.recording.events[at]);
  }

  #row(event, now) {
    const current = now ? { class: "now", "aria-current": "true", tabindex: 0 } : { tabindex: -1 };
    const attributes = { type: "button", "data-at": event.at, ...current };
    const texts = {
      mark: now ? "▶" : "",
      "phase-number": event.phase || "–",
      process: this.#shortName(this.recording.processes[event.process]),
      name: event.name + { B: " ⟨ begins", E: " ⟩ ends", i: "" }[event.ph],
      who: this.recording.label(event.req),
    };
    const cells = Object.entries(texts).map(([name, text]) => make("span", { class: name }, String(text)));
    return this.#seeking(make("button", attributes, ...cells), event.at);
  }

  /** The number of an engine is only said where there are several. */
  #shortName({ name }) {
    return this.recording.engines.length > 1 ? name.replace("EngineCore", "Engine") : name.replace(/_DP\d+$/, "");
  }

  #seeking(button, at) {
    button.addEventListener("click", () => this.seek(at));
    return button;
  }

  #drawEvent(event) {
    const find = (selector) => this.event.querySelector(selector);
    find(".event-name").textContent = this.recording.oneLine(event);
    find(".meaning").textContent = this.recording.meaning(event);
    const links = event.cause >= 0 ? [["caused by", this.#link(event.cause)]] : [];
    for (const at of (this.recording.effects.get(event.at) ?? []).slice(0, 3)) links.push(["causes", this.#link(at)]);
    const pairs = [...this.#facts(event), ...links];
    find(".facts").replaceChildren(...pairs.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }

  #facts(event) {
    const { recording } = this;
    const { vllm, stage } = recording.meanings.get(event.name);
    const facts = [
      ["in vLLM", vllm],
      ["here", [stage, event.source].filter(Boolean).join(" · ")],
      ["process", `${recording.processes[event.process].name}, ${timeText(event.us)} after the start`],
    ];
    if (event.req >= 0) {
      const { id, label } = recording.requests[event.req];
      facts.push(["request", `${label} = ${id}, ${STATUS_WORDS[recording.current.requests[event.req].status]}`]);
    }
    const texts = Object.entries(event.args).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]);
    return [...facts, ...texts];
  }

  #link(at) {
    const event = this.recording.events[at];
    const text = `${this.recording.oneLine(event)} in ${this.recording.processes[event.process].name}, event ${at + 1}`;
    return this.#seeking(make("button", { type: "button", class: "link" }, text), at);
  }
}
