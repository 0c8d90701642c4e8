// Part 6 of 9: the pictures and the table of one engine.

const MANY_BLOCKS = 256; // drawn at least; of a larger cache, as many as have been used
const MARGIN = 40; // left of the steps: the names of the requests
const LANES = 16; // requests in the picture of the steps
const MAX_ROWS = 40; // requests in the table
const MAX_BLOCKS = 4096; // cells in the picture of the KV cache

const HUES = 6; // colours of requests; those of the states are others
const PATTERNS = ["", "stripes", "checks"];
const STATES = { running: "●", waiting: "○", preempted: "×", ended: "■" };
const tiles = new Map();

/** A piece of a pattern, to be laid side by side. */
function tile(ink, paper, pattern) {
  const canvas = make("canvas", { width: 6, height: 6 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = ink;
  pen.fillRect(0, 0, 6, 6);
  pen.fillStyle = paper;
  for (let y = 0; y < 6; y++) {
    if (pattern === "checks") pen.fillRect(y < 3 ? 0 : 3, y, 3, 1);
    else for (const x of [y, y + 1]) pen.fillRect(x % 6, y, 1, 1);
  }
  return canvas;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const percent = (part, whole) => (whole ? Math.round((100 * part) / whole) : 0);

class EngineView {
  #suffix;

  /** `suffix`: what the ids of this view's elements have at their end. */
  constructor(state, suffix = "") {
    this.state = state;
    this.number = null; // which engine it shows
    this.serves = true;
    this.isAlone = true;
    this.history = new History();
    this.past = null; // the state that is shown instead of the present one
    this.diedAt = null; // the last step of the engine that died here
    this.#suffix = suffix;
    this.#point();
  }

  get shown() {
    return this.past ?? this.state;
  }

  /** A view like this one, behind all others on the page, with elements of its own. */
  copy(state, suffix) {
    const root = this.at("pictures").cloneNode(true);
    for (const element of [root, ...root.querySelectorAll("[id]")]) element.id += suffix;
    this.at("pictures").parentElement.append(root);
    return new EngineView(state, suffix);
  }

  remove() {
    this.at("pictures").remove();
  }

  at(id) {
    return byId(id + this.#suffix);
  }

  /** Which engine this is, and what it is doing. Another one, or one that was started again, begins from nothing. */
  shows(number, doing, isAlone) {
    const serves = doing === "ready" || doing === "draining";
    if (number !== this.number) this.diedAt = null;
    else if (!serves && doing === "dead" && this.serves) this.diedAt = this.state.step;
    if (number !== this.number || (serves && !this.serves)) {
      this.state.clear();
      this.history.cut();
    }
    Object.assign(this, { number, serves, isAlone });
    const [root, name] = [this.at("pictures"), this.at("engine-name")];
    name.hidden = isAlone;
    name.textContent = `Engine ${number}: ${doing}`;
    const death = { dead: "It is started again, as often as --data-parallel-restart allows.", loading: "It is being started again.", ready: "It has been started again.", draining: "" };
    this.at("death").textContent = this.diedAt === null ? "" : `Died after step ${this.diedAt}. ${death[doing] ?? ""}`;
    root.querySelector(".scrolls").setAttribute("aria-label", isAlone ? "Requests" : `Requests of engine ${number}`);
    if (isAlone) for (const attribute of ["role", "aria-label"]) root.removeAttribute(attribute);
    else Object.entries({ role: "group", "aria-label": `Engine ${number}` }).forEach((pair) => root.setAttribute(...pair));
    this.drawSoon();
  }

  /** Is what it shows the present? */
  setPast(isPast) {
    this.at("pictures").classList.toggle("past", isPast || !this.serves);
  }

  drawSoon = once(() => {
    if (this.at("pictures")) this.draw();
  });

  draw() {
    const { settings, free, step } = this.shown;
    const used = settings.num_blocks - free;
    const waiting = this.shown.count("waiting") + this.shown.count("preempted");
    const facts = { step, running: this.shown.count("running"), waiting, used, free, blocks: settings.num_blocks };
    Object.assign(this.at("pictures").dataset, facts);
    for (const [name, value] of Object.entries(facts)) {
      const place = this.at(`fact-${name}`);
      if (place) place.textContent = value;
    }
    this.at("drafts").hidden = !this.shown.drafts.length;
    this.at("drafts-text").textContent = this.shown.drafts.map((place) => `${percent(place.accepted, place.verified)} %`).join(" · ");
    this.at("held-back").textContent = this.shown.heldBack;
    this.#drawBudget();
    this.#drawLanes();
    this.#drawCurves();
    this.#drawBlocks(used);
    this.#drawTable();
  }

  /** Which of the looks a request has: HUES colours, plain first, then with each of the patterns. */
  look(id) {
    const place = ((this.shown.labels.get(id) ?? 1) - 1) % (HUES * PATTERNS.length);
    return { hue: `--hue-${place % HUES}`, pattern: PATTERNS[Math.floor(place / HUES)] };
  }

  /** The same to draw with. */
  fill(pen, id) {
    const { hue, pattern } = this.look(id);
    const ink = colour(hue);
    if (!pattern) return ink;
    const paper = colour("--pattern");
    const name = `${ink} ${pattern} ${paper}`;
    if (!tiles.has(name)) tiles.set(name, tile(ink, paper, pattern));
    return pen.createPattern(tiles.get(name), "repeat");
  }

  #drawCurves() {
    const look = (pen, id) => this.fill(pen, id);
    let pointed = "";
    for (const name of Object.keys(CURVES)) {
      const cleared = this.#cleared(`curve-${name}`, CURVE_HEIGHT);
      const { title, explains, cut, now } = drawCurve(cleared, name, this.shown, look, this.#column);
      const more = cut ? ` ${cut} ${cut === 1 ? "value lies" : "values lie"} above the axis (▲).` : "";
      cleared.canvas.setAttribute("aria-label", `${title}, ${now}. It is: ${explains}${more}`);
      if (name === this.#curve) pointed = `${title}, ${now}. ${explains[0].toUpperCase()}${explains.slice(1)}${more}`;
    }
    this.at("curve-text").textContent = pointed || "Point at a curve: it says what it is. ▲: above the axis.";
  }

  #column = null; // of the curves, under the pointer
  #curve = ""; // which of them

  #point() {
    const follow = (name, event) => {
      const { left, width } = event.target.getBoundingClientRect();
      const column = Math.floor(((event.clientX - left - MARGIN) / (width - MARGIN)) * STEPS_KEPT);
      this.#column = column >= 0 && column < this.shown.steps.length ? column : null;
      this.#curve = name;
      this.drawSoon();
    };
    for (const name of Object.keys(CURVES)) {
      const canvas = this.at(`curve-${name}`);
      for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, (event) => follow(name, event));
      canvas.addEventListener("focus", () => ((this.#curve = name), this.drawSoon()));
      for (const kind of ["pointerleave", "blur"]) {
        canvas.addEventListener(kind, () => {
          this.#column = null;
          this.#curve = "";
          this.drawSoon();
        });
      }
    }
  }

  /** A canvas of the size that it has on the page, cleared, in CSS pixels. */
  #cleared(id, height) {
    const canvas = this.at(id);
    const [ratio, width] = [window.devicePixelRatio || 1, canvas.parentElement.clientWidth];
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return { canvas, pen, width, height };
  }

  #drawBudget() {
    const { canvas, pen, width, height } = this.#cleared("budget", 96);
    const last = this.shown.steps.at(-1);
    const column = (width - MARGIN) / STEPS_KEPT;
    const scale = (height - 14) / Math.max(1, ...this.shown.steps.map((done) => done.total));
    this.shown.steps.forEach((done, place) => {
      let y = height;
      for (const [id, [tokens]] of done.given) {
        pen.fillStyle = this.fill(pen, id);
        pen.fillRect(MARGIN + place * column, y - tokens * scale, Math.max(1, column - 1), tokens * scale);
        y -= tokens * scale;
      }
    });
    pen.fillStyle = colour("--soft");
    const most = Math.max(0, ...this.shown.steps.map((done) => done.total));
    if (most) pen.fillText(most === 1 ? "1 token" : `${most} tokens`, 2, 7);
    const words = last ? `step ${last.step}: ${last.total} of ${last.budget} tokens, ${percent(last.total, last.budget)} %` : "no step yet";
    this.at("budget-text").textContent = words;
    this.at("budget-bar").value = last ? last.total / last.budget : 0;
    canvas.setAttribute("aria-label", `Tokens in each of the last ${this.shown.steps.length} steps; ${words}`);
  }

  /** The requests that the last steps were about, the oldest first. */
  #lanes() {
    const ids = new Set();
    for (const done of this.shown.steps) for (const id of [...done.given.keys(), ...done.preempted, ...done.waiting]) ids.add(id);
    for (const [id, request] of this.shown.requests) if (request.status !== "ended") ids.add(id);
    return [...ids];
  }

  #drawLanes() {
    const all = this.#lanes();
    const ids = all.slice(-LANES);
    this.at("lanes-text").textContent = all.length > LANES ? `the last ${LANES} of ${all.length}; ` : "";
    const row = 18;
    const { canvas, pen, width } = this.#cleared("steps", Math.max(2, ids.length) * row);
    const column = (width - MARGIN) / STEPS_KEPT;
    ids.forEach((id, place) => {
      const y = place * row;
      pen.fillStyle = colour("--text");
      pen.fillText(this.shown.label(id), 2, y + row / 2);
      this.shown.steps.forEach((done, at) => {
        const [tokens, ofPrompt] = done.given.get(id) ?? [0, false];
        const x = MARGIN + at * column;
        pen.fillStyle = this.fill(pen, id);
        if (tokens && ofPrompt) pen.fillRect(x, y + 2, Math.max(1, column - 1), row - 4);
        else if (tokens) pen.fillRect(x, y + 7, Math.max(1, column - 1), row - 14);
        pen.fillStyle = colour("--waiting");
        if (done.waiting.includes(id)) pen.fillRect(x, y + row / 2 - 1, Math.max(1, column - 1), 2);
        pen.fillStyle = colour("--preempted");
        if (done.preempted.has(id)) pen.fillText(STATES.preempted, x, y + row / 2);
        pen.fillStyle = colour("--ended");
        if (done.ended.includes(id)) pen.fillRect(x + column - 1, y + 2, 3, row - 4);
      });
    });
    canvas.setAttribute("aria-label", `Which of ${ids.length} requests got tokens in which step; the table below says how far each has come`);
  }

  /** How many blocks to draw: those of a large cache that nobody has touched yet would only fill the page. */
  #blocksToDraw() {
    let highest = MANY_BLOCKS;
    for (const touched of [this.shown.holders.keys(), this.shown.cached]) for (const block of touched) highest = Math.max(highest, block);
    return Math.min(this.shown.settings.num_blocks, MAX_BLOCKS, Math.ceil(highest / MANY_BLOCKS) * MANY_BLOCKS);
  }

  #drawBlocks(used) {
    const total = this.#blocksToDraw();
    const width = this.at("blocks").parentElement.clientWidth;
    const size = total > 1024 ? 8 : total > 256 ? 12 : 18;
    const perRow = Math.max(1, Math.floor(width / size));
    const { canvas, pen } = this.#cleared("blocks", Math.max(1, Math.ceil(total / perRow)) * size);
    const [line, text, soft] = [colour("--line"), colour("--text"), colour("--soft")];
    pen.textAlign = "center";
    pen.font = `${size > 12 ? 10 : 8}px system-ui, sans-serif`;
    for (let block = 1; block <= total; block++) {
      const [x, y] = [((block - 1) % perRow) * size, Math.floor((block - 1) / perRow) * size];
      this.#drawBlock(pen, x, y, size, { who: [...(this.shown.holders.get(block) ?? [])], cached: this.shown.cached.has(block), line, text, soft });
    }
    const cut = total < this.shown.settings.num_blocks ? ` (the first ${total} are shown)` : "";
    const words = `${used} of ${this.shown.settings.num_blocks} blocks in use, ${percent(used, this.shown.settings.num_blocks)} %${cut}`;
    this.at("blocks-text").textContent = words;
    canvas.setAttribute("aria-label", words);
  }

  #drawBlock(pen, x, y, size, { who, cached, line, text, soft }) {
    const inner = size - 2;
    who.slice(0, 3).forEach((id, place, all) => {
      pen.fillStyle = this.fill(pen, id);
      pen.fillRect(x + (place * inner) / all.length, y, inner / all.length, inner);
    });
    pen.strokeStyle = who.length ? text : line;
    pen.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
    if (cached) {
      pen.fillStyle = who.length ? text : soft;
      pen.fillRect(x + inner / 2 - 1.5, y + inner - 5, 3, 3);
    }
    if (who.length > 1 && size > 12) {
      pen.fillStyle = colour("--panel");
      pen.fillRect(x + 3, y + 1, inner - 6, 10);
      pen.fillStyle = text;
      pen.fillText(String(who.length), x + inner / 2, y + 6);
    }
  }

  #drawTable() {
    const order = { running: 0, preempted: 1, waiting: 2, ended: 3 };
    const held = new Map();
    for (const who of this.shown.holders.values()) for (const id of who) held.set(id, (held.get(id) ?? 0) + 1);
    const all = [...this.shown.requests].sort(([, a], [, b]) => order[a.status] - order[b.status]);
    const rows = all.slice(0, MAX_ROWS).map(([id, request]) => {
      const { status, computed, tokens, given, note } = request;
      const key = make("i", { class: "key" });
      const { hue, pattern } = this.look(id);
      key.style.backgroundColor = `var(${hue})`;
      key.dataset.pattern = pattern;
      const state = make("td", {}, make("i", { class: `state ${status}`, "aria-hidden": "true" }, STATES[status]), status === "ended" ? "finished" : status);
      const cells = [`${computed} of ${tokens}`, given || "", held.get(id) ?? 0, note].map((value) => make("td", {}, String(value)));
      return make("tr", { "data-req": id, "data-status": status }, make("th", { scope: "row", title: id }, key, this.shown.label(id)), state, ...cells);
    });
    this.at("rows").replaceChildren(...rows);
    const left = all.length - rows.length + this.shown.unlisted;
    this.at("rows-left").textContent = left > 0 ? `and ${left} more` : all.length ? "" : "No request has come since this page began to watch.";
  }
}
