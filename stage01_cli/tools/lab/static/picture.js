// Part 4 of 5: what came of it, as requests x steps, as blocks, and in words.

const ALSO = { admitted: 1, resumed: 2, preempted: 4, token: 8, ended: 16 };
const NARROW = 9; // pixels: narrower cells than this scroll
const WIDE = 30;
const WRITTEN = 19; // pixels that a number needs
const DENSE = 128; // blocks
const SAID = {
  waiting: "waits", prefill: "computes tokens that it has", decode: "computes one token and gets the next", preempted: "is preempted", nothing: "runs, but gets no token",
};

class Picture {
  #cells = new Map(); // "row,step" -> td
  #columns = [];
  #selected = [0, 1]; // row, step
  #shown = [0, 1]; // the same, or what the pointer is on

  /** `onArrival(place, step)`: an arrival was dragged. */
  constructor(onArrival) {
    this.run = null;
    this.onArrival = onArrival;
    const grid = byId("grid");
    grid.addEventListener("click", (event) => this.#onCell(event, ([row, step]) => this.select(row, step, true)));
    grid.addEventListener("pointerover", (event) => this.#onCell(event, ([row, step]) => this.#show(row, step)));
    grid.addEventListener("pointerleave", () => this.#show(...this.#selected));
    grid.addEventListener("keydown", (event) => this.#key(event));
    byId("scrub").addEventListener("input", () => this.select(this.#selected[0], byId("scrub").valueAsNumber));
    new ResizeObserver(() => this.#setWidth()).observe(byId("scrolls"));
  }

  get step() {
    return this.#selected[1];
  }

  get lastStep() {
    return this.run?.steps.length ?? 1;
  }

  /** Draw a run; that of the reference above it, if it is the learner's. What was selected stays selected, as far as it still exists. */
  draw(run, reference = null) {
    const hadFocus = byId("grid").contains(document.activeElement) && document.activeElement.className === "cell";
    this.#drawBeside(reference);
    this.#drawGrid(run);
    byId("scrub").max = this.lastStep;
    this.#setWidth();
    const row = Math.min(this.#selected[0], run.requests.length - 1);
    this.select(row, Math.min(this.step, this.lastStep), hadFocus);
    this.#drawFacts();
  }

  #drawGrid(run) {
    this.run = run;
    this.#cells.clear();
    this.#columns = [];
    const body = make("tbody", {}, ...run.requests.map((facts, row) => this.#row(facts, row)));
    byId("grid").replaceChildren(this.#head(), body);
  }

  /** The reference's run: drawn like the other, and kept as a copy that only shows. */
  #drawBeside(run) {
    byId("beside").hidden = !run;
    byId("beside-grid").replaceChildren();
    this.reference = null;
    if (!run) return;
    this.#drawGrid(run);
    this.reference = this.numbers();
    const copy = byId("grid").cloneNode(true);
    copy.querySelectorAll(".arrival").forEach((handle) => handle.remove());
    for (const cell of copy.querySelectorAll(".cell")) for (const name of ["role", "tabindex", "aria-selected"]) cell.removeAttribute(name);
    byId("beside-grid").replaceChildren(...copy.childNodes);
  }

  #setWidth() {
    if (!this.run) return;
    const names = byId("grid").querySelector("tbody th")?.offsetWidth ?? 80;
    const beside = [...byId("beside-grid").querySelectorAll("thead tr:first-child td")];
    const width = Math.floor((byId("scrolls").clientWidth - names - 4) / Math.max(this.lastStep, beside.length));
    const cell = Math.max(NARROW, Math.min(WIDE, width));
    for (const id of ["grid", "beside-grid"]) byId(id).style.setProperty("--cell", `${cell}px`);
    const every = cell >= WRITTEN ? 1 : cell >= 12 ? 2 : 5;
    const number = (head, place) => (head.textContent = (place + 1) % every && place ? "" : String(place + 1));
    this.#columns.forEach(({ head }, place) => number(head, place));
    beside.forEach(number);
    for (const cellOf of [...this.#cells.values(), ...byId("beside-grid").querySelectorAll(".cell")]) {
      const bar = cellOf.firstElementChild;
      if (bar) bar.textContent = cell >= WRITTEN ? (bar.dataset.text ?? "") : "";
    }
  }

  #head() {
    const { steps, settings } = this.run;
    const numbers = make("tr", {}, make("th", { scope: "row" }, "step"));
    const budget = make("tr", { class: "budget" }, make("th", { scope: "row" }, `of ${settings.max_num_batched_tokens} tokens`));
    steps.forEach(({ step, used }) => {
      const parts = { prefill: 0, decode: 0 };
      for (const cells of Object.values(this.run.cells)) if (cells[step]?.[1]) parts[DATA.kinds[cells[step][0]]] += cells[step][1];
      const bars = Object.entries(parts).filter(([, count]) => count).map(([kind, count]) => {
        const bar = make("i", { class: `k-${kind}` });
        bar.style.setProperty("--share", count / settings.max_num_batched_tokens);
        return bar;
      });
      const head = make("td", { "data-at": `0,${step}` });
      const column = make("td", { "data-at": `0,${step}`, title: `step ${step}: ${used} of ${settings.max_num_batched_tokens} tokens` }, make("div", { class: "bar" }, ...bars.reverse()));
      this.#columns.push({ head, column });
      numbers.append(head);
      budget.append(column);
    });
    return make("thead", {}, numbers, budget);
  }

  #row(facts, row) {
    const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
    const line = make("tr", {}, make("th", { scope: "row", title: facts.id }, swatch, facts.id));
    line.style.setProperty("--hue", `var(--hue-${row % HUES})`);
    for (let step = 1; step <= this.lastStep; step++) {
      const cell = this.#cell(facts, row, step);
      this.#cells.set(`${row},${step}`, cell);
      line.append(cell);
    }
    return line;
  }

  #cell(facts, row, step) {
    const found = this.run.cells[facts.id][step];
    const cell = make("td", { class: "cell", role: "gridcell", "data-at": `${row},${step}`, tabindex: "-1", "aria-selected": "false" });
    if (step === facts.arrival) cell.append(this.#arrival(facts));
    if (!found) return cell;
    const [place, given, , , hit, also] = found;
    const kind = DATA.kinds[place];
    cell.classList.add(`k-${kind}`);
    cell.classList.toggle("hit", hit > 0);
    const bar = make("i");
    if (kind === "prefill") bar.dataset.text = given;
    cell.prepend(bar);
    if (also & ALSO.preempted) cell.append(make("span", { class: "mark lost", "aria-hidden": "true" }, "✕"));
    if (also & ALSO.ended) cell.append(make("span", { class: "mark ends", "aria-hidden": "true" }, "■"));
    cell.setAttribute("aria-label", `${facts.id}, step ${step}: ${this.#inWords(found)}`);
    return cell;
  }

  #inWords([place, given, computed, known, hit, also]) {
    const kind = DATA.kinds[place];
    const words = [kind === "prefill" ? `prefill of ${given}` : kind === "decode" ? "decode" : SAID[kind]];
    if (also & ALSO.preempted) words[0] = "loses its blocks";
    if (hit) words.push(`${hit} tokens from the prefix cache`);
    if (given) words.push(`${computed} of ${known} tokens computed`);
    if (also & ALSO.ended) words.push("ends");
    return words.join(", ");
  }

  // Arrivals that can be moved

  #arrival({ id, place, arrival }) {
    const [least, most] = DATA.request_fields.arrival;
    const handle = make("button", {
      type: "button", class: "arrival", role: "slider", "aria-label": `arrival of ${id}`, "aria-valuemin": least, "aria-valuemax": most, "aria-valuenow": arrival, "data-place": place,
      title: `${id} arrives before step ${arrival}; drag it`,
    });
    handle.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      event.stopPropagation();
      this.#move(place, arrival + by);
    });
    handle.addEventListener("pointerdown", (event) => this.#drag(event, place, arrival));
    return handle;
  }

  #move(place, step) {
    this.movedPlace = place; // the new picture has a new handle: it gets the focus
    this.onArrival(place, step);
  }

  #drag(down, place, arrival) {
    down.preventDefault();
    down.target.focus();
    const width = this.#columns[0].head.getBoundingClientRect().width;
    let last = arrival;
    const move = (event) => {
      const step = arrival + Math.round((event.clientX - down.clientX) / width);
      if (step !== last) this.#move(place, (last = step));
    };
    const stop = () => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", stop);
      removeEventListener("pointercancel", stop);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop);
    addEventListener("pointercancel", stop);
  }

  // What is looked at

  #onCell(event, use) {
    const at = event.target.closest?.("[data-at]")?.dataset.at;
    if (!at || event.target.closest(".arrival")) return;
    const [row, step] = at.split(",").map(Number);
    use([event.target.closest("thead") ? this.#selected[0] : row, step]);
  }

  #key(event) {
    if (event.target.closest(".arrival")) return;
    const [row, step] = this.#selected;
    const to = {
      ArrowLeft: [row, step - 1], ArrowRight: [row, step + 1], ArrowUp: [row - 1, step], ArrowDown: [row + 1, step],
      Home: [row, 1], End: [row, this.lastStep], PageUp: [0, step], PageDown: [this.run.requests.length - 1, step],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    this.select(to[0], to[1], true);
  }

  /** Pin a request and a step: the reason and the blocks are theirs until the pointer is on another. */
  select(row, step, focus = false) {
    const old = this.#cells.get(this.#selected.join(","));
    old?.setAttribute("aria-selected", "false");
    old?.setAttribute("tabindex", "-1");
    this.#selected = [Math.max(0, Math.min(this.run.requests.length - 1, row)), Math.max(1, Math.min(this.lastStep, step))];
    const cell = this.#cells.get(this.#selected.join(","));
    cell?.setAttribute("aria-selected", "true");
    cell?.setAttribute("tabindex", "0");
    if (focus) cell?.focus({ preventScroll: false });
    this.#scrollTo(cell);
    byId("scrub").value = this.step;
    this.#show(...this.#selected);
  }

  /** Bring a column into sight, without moving the page. */
  #scrollTo(cell) {
    if (!cell) return;
    const [box, names] = [byId("scrolls"), byId("grid").querySelector("tbody th").offsetWidth];
    if (cell.offsetLeft - names < box.scrollLeft) box.scrollLeft = cell.offsetLeft - names;
    const beyond = cell.offsetLeft + cell.offsetWidth - box.clientWidth;
    if (beyond > box.scrollLeft) box.scrollLeft = beyond;
  }

  #show(row, step) {
    for (const at of [this.#shown[1], step]) {
      const isNow = at === step;
      const { head, column } = this.#columns[at - 1] ?? {};
      for (const cell of [head, column, ...this.run.requests.map((_, place) => this.#cells.get(`${place},${at}`))]) cell?.classList.toggle("now", isNow);
      for (const cell of byId("beside-grid").querySelectorAll(`[data-at$=",${at}"]`)) cell.classList.toggle("now", isNow);
    }
    this.#shown = [row, step];
    byId("now").textContent = `${step} of ${this.lastStep}`;
    this.#drawWhy(row, step);
    this.#drawBlocks(row, step);
  }

  #drawWhy(row, step) {
    const facts = this.run.requests[row];
    if (!facts) return byId("why").replaceChildren();
    const found = this.run.cells[facts.id][step];
    const said = found ? this.#inWords(found) : step < facts.arrival ? `has not arrived: it comes before step ${facts.arrival}` : facts.ended && step > facts.ended ? `ended in step ${facts.ended}` : "nothing is known";
    const reasons = (this.run.why[facts.id]?.[step] ?? []).map((place) => {
      const [rule, text] = this.run.texts[place];
      const kind = rule === "chunk" ? DATA.kinds[found?.[0]] : rule === "preempt" ? "preempted" : "";
      return make("li", { class: kind && `k-${kind}` }, text, make("code", {}, this.run.rules[rule]));
    });
    const none = found && !reasons.length ? [make("p", { class: "caption" }, "This scheduler emitted no trace event for it, so there is no reason to tell.")] : [];
    const before = this.run.before[step];
    const state = before ? [make("details", {}, make("summary", {}, "The engine before this step"), make("p", { class: "caption" }, before.join(". ")))] : [];
    const open = byId("why").querySelector("details")?.open;
    byId("why").replaceChildren(make("h3", {}, `${facts.id} in step ${step}: ${said}`), make("ul", {}, ...reasons), ...none, ...state);
    if (open && state.length) byId("why").querySelector("details").open = true;
  }

  #drawBlocks(row, step) {
    const found = this.run.steps[step - 1];
    const total = this.run.settings.num_gpu_blocks_override;
    const holders = new Map();
    const rows = new Map(this.run.requests.map(({ id }, place) => [id, place]));
    for (const [id, table] of Object.entries(found?.tables ?? {})) for (const block of table) holders.set(block, [...(holders.get(block) ?? []), id]);
    const cached = new Set(found?.cached ?? []);
    const mine = this.run.requests[row]?.id;
    const list = Array.from({ length: total }, (_, block) => this.#block(block, holders.get(block) ?? [], cached.has(block), rows, mine));
    byId("blocks").classList.toggle("dense", total > DENSE);
    byId("blocks").replaceChildren(...list);
    byId("blocks-text").textContent = found ? `after the decision of step ${step}: ${total - 1 - found.free} held, ${found.free} free, ${cached.size} can be found` : "";
  }

  #block(block, who, isCached, rows, mine) {
    const state = block === 0 ? "b-null" : who.length ? "b-held" : "b-free";
    const words = block === 0 ? "the null block: never given out" : [who.length ? `held by ${who.join(", ")}` : "free", ...(isCached ? ["can be found by its hash"] : [])].join("; ");
    const item = make("li", { class: `block ${state}${isCached ? " b-cached" : ""}${who.includes(mine) ? " mine" : ""}`, title: `block ${block}: ${words}`, "aria-label": `block ${block}: ${words}` });
    item.append(make("small", {}, String(block)), make("b", {}, block === 0 ? "–" : who.length > 2 ? `${who.length}×` : who.join(" ")));
    if (who.length) item.style.setProperty("--hue", `var(--hue-${rows.get(who[0]) % HUES})`);
    return item;
  }

  // Numbers

  /** The run in numbers; the first is what a client of this load would feel. */
  numbers() {
    const { requests, steps, settings } = this.run;
    const busy = steps.filter(({ idle }) => !idle);
    const first = requests.filter(({ first_token: step }) => step);
    const mean = (values) => (values.length ? (values.reduce((a, b) => a + b, 0) / values.length).toFixed(1) : "–");
    const sum = (field) => requests.reduce((total, facts) => total + facts[field], 0);
    return {
      "steps": busy.length,
      "steps to the first token, mean": mean(first.map((facts) => facts.first_token - facts.arrival + 1)),
      "and longest": first.length ? Math.max(...first.map((facts) => facts.first_token - facts.arrival + 1)) : "–",
      "tokens computed": sum("computed"),
      "found in the cache": sum("cached"),
      "preemptions": sum("preemptions"),
      "budget used, %": busy.length ? Math.round((100 * busy.reduce((total, { used }) => total + used, 0)) / (busy.length * settings.max_num_batched_tokens)) : "–",
    };
  }

  /** Numbers of an earlier run to show beside this one's, or null. */
  keep(numbers) {
    this.kept = numbers;
    this.#drawFacts();
  }

  #drawFacts() {
    const items = Object.entries(this.numbers()).map(([name, value]) => {
      const other = (numbers, words) => (numbers && String(numbers[name]) !== String(value) ? [make("small", {}, ` ${words} ${numbers[name]}`)] : []);
      return make("div", {}, make("dt", {}, name), make("dd", {}, String(value), ...other(this.reference, "the project's own"), ...other(this.kept, "was")));
    });
    byId("facts").replaceChildren(...items);
  }
}
