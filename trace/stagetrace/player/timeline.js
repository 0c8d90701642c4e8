// Part 3 of 8: the requests over time, with an axis that can be zoomed.

const ROW = 15, AXIS = 18, NAMES = 64; // pixels: a request's row, the axis above them, the names before them
const SHORTEST = 20; // microseconds that the whole width shows at least
const BARS = { api: "soft", waiting: "soft", prefill: "prefill", decode: "decode", preempted: "preempted" }; // status -> colour

/** A bar per request that shows when it waited, was in prefill, decoded or was preempted. The axis is time since the start of the recording. */
class RequestTimeline {
  /** `from`: the event before which the start-up is, which is folded away; `seek(place of an event)` is what a click asks for. */
  constructor(recording, section, from, seek) {
    Object.assign(this, { recording, section, seek, at: 0, scrolled: 0, isDim: () => false });
    this.element = section.querySelector(".tracks");
    this.clock = new Float64Array(recording.events.length); // latest time so far, by place: events stand in causal order
    recording.events.forEach(({ us }, at) => { this.clock[at] = Math.max(us, at ? this.clock[at - 1] : 0); });
    this.end = Math.max(1, this.clock.at(-1));
    const seen = ({ status }) => status === "waiting" || status === "api";
    this.rows = recording.spans.map((spans, req) => ({ spans, req })).filter(({ spans }) => spans.some(seen));
    this.rowOf = new Map(this.rows.map(({ req }, row) => [req, row]));
    this.folded = this.clock[from];
    this.view = [this.folded, this.end]; // microseconds at the left and at the right edge
    this.deaths = recording.events.filter(({ name }) => /^(engine\.dead|engine\.failed|dp\.engine_lost)$/.test(name));
    this.surface = new Surface(this.element, () => this.#height(), () => this.#paint());
    this.#setUp();
  }

  #setUp() {
    const { element } = this;
    const spacer = make("div", { class: "spacer" });
    spacer.style.height = `${Math.max(0, this.rows.length * ROW + AXIS - this.#height())}px`;
    element.append(spacer);
    const labels = this.rows.map(({ req }) => this.recording.label(req));
    element.setAttribute("aria-label", `${counted(this.rows.length, "request")} over ${timeText(this.end)}: ${labels.slice(0, 20).join(", ")}`);
    element.addEventListener("scroll", () => {
      if (element.scrollTop === this.scrolled) return; // `draw` scrolled it, and has painted
      this.scrolled = element.scrollTop;
      this.#paint();
    }, { passive: true });
    element.addEventListener("wheel", (wheel) => this.#wheel(wheel), { passive: false });
    element.addEventListener("click", (click) => this.seek(this.#placeAt(this.#timeOf(click))));
    element.addEventListener("pointermove", (move) => { element.title = this.#wordsAt(move); });
    const on = (name, act) => this.section.querySelector(name).addEventListener("click", act);
    on(".zoom-in", () => this.zoom(0.5));
    on(".zoom-out", () => this.zoom(2));
    on(".zoom-all", () => this.showAll());
    this.startUp = this.section.querySelector(".start-up");
    this.startUp.hidden = this.folded === 0;
    this.startUp.textContent = `+ start-up, ${(this.folded / 1e6).toFixed(1)} s`;
    on(".start-up", () => this.show(0, this.end));
  }

  #height() {
    return Math.min(140, this.rows.length * ROW + AXIS);
  }

  draw(at, running) {
    this.at = at;
    const now = this.clock[at], [from, to] = this.view;
    if (now < from || now > to) this.#moveTo(now);
    this.#follow(this.recording.events[at].req, running);
    this.#paint();
  }

  filter(isDim) {
    this.isDim = isDim;
    this.#paint();
  }

  /** Zoom about the current moment if it is seen, else about the middle. `by` below 1 shows less. */
  zoom(by, about = this.clock[this.at]) {
    const [from, to] = this.view;
    const centre = about >= from && about <= to ? about : (from + to) / 2;
    this.show(centre - (centre - from) * by, centre + (to - centre) * by);
  }

  showAll() {
    this.show(this.folded, this.end);
  }

  show(from, to) {
    const width = Math.min(this.end, Math.max(SHORTEST, to - from));
    const left = Math.min(Math.max(0, from), this.end - width);
    this.view = [left, left + width];
    this.#paint();
  }

  /** What is left of the view was folded away, or zoomed out of it. */
  #moveTo(now) {
    const [from, to] = this.view, width = to - from;
    if (to === this.end && now < from) this.view = [now, to];
    else this.show(now - width / 4, now + width * 0.75);
  }

  /** The request of the event, or else the first one that runs, is among the rows that are seen. */
  #follow(req, running) {
    const row = this.rowOf.get(req) ?? this.rowOf.get(running[0]);
    const room = Math.max(1, Math.floor((this.#height() - AXIS) / ROW));
    if (row === undefined || this.rows.length <= room) return;
    const first = Math.ceil(this.scrolled / ROW);
    if (row >= first && row < first + room) return;
    this.scrolled = Math.min(Math.max(0, row - Math.floor(room / 2)), this.rows.length - room) * ROW;
    requestAnimationFrame(() => { this.element.scrollTop = this.scrolled; });
  }

  #wheel(wheel) {
    if (!wheel.ctrlKey && !wheel.shiftKey) return; // that scrolls
    wheel.preventDefault();
    const [from, to] = this.view, turned = wheel.deltaY || wheel.deltaX;
    if (wheel.ctrlKey) this.zoom(turned > 0 ? 1.25 : 0.8, this.#timeOf(wheel));
    else this.show(from + ((to - from) * turned) / 1000, to + ((to - from) * turned) / 1000);
  }

  #timeOf({ clientX }) {
    const { left } = this.element.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (clientX - left - NAMES) / Math.max(1, this.surface.width - NAMES)));
    return this.view[0] + share * (this.view[1] - this.view[0]);
  }

  /** The last event that is not after this time. */
  #placeAt(us) {
    return Math.max(0, firstNotBelow(this.clock, us + 1) - 1);
  }

  #wordsAt(move) {
    const { top } = this.element.getBoundingClientRect();
    const row = this.rows[Math.floor((move.clientY - top - AXIS + this.scrolled) / ROW)];
    const us = this.#timeOf(move), at = this.#placeAt(us);
    const span = row?.spans.findLast(({ start }) => start <= at);
    return `${timeText(Math.round(us))}${row ? `, ${this.recording.label(row.req)}: ${STATUS_WORDS[span?.status ?? "unknown"]}` : ""}`;
  }

  #x(us) {
    const [from, to] = this.view;
    return NAMES + ((us - from) / (to - from)) * (this.surface.width - NAMES);
  }

  #paint() {
    const { surface } = this;
    if (!surface?.width) return; // nobody sees it yet
    const { width, height } = surface;
    surface.fill("panel", 0, 0, width, height);
    const first = Math.floor(this.scrolled / ROW), last = Math.ceil((this.scrolled + height - AXIS) / ROW);
    const rows = this.rows.slice(first, last).map((row, k) => [row, AXIS + (first + k) * ROW - this.scrolled]);
    for (const [row, y] of rows) this.#paintBars(row, y);
    surface.fill("panel", 0, 0, NAMES, height); // what stands too far to the left or above is covered
    for (const [{ req }, y] of rows) surface.text(this.isDim(req) ? "soft" : "text", this.recording.label(req).slice(0, 9), 0, y + 11, 11);
    surface.fill("panel", 0, 0, width, AXIS);
    this.#paintAxis();
    for (const { us } of this.deaths) this.#paintDeath(this.#x(us));
    const now = this.#x(this.clock[this.at]);
    if (now >= NAMES) surface.fill("text", now - 1, 0, 2, height);
  }

  #paintBars({ spans, req }, y) {
    const { surface } = this;
    spans.forEach(({ start, status }, k) => {
      if (!BARS[status]) return;
      const x = this.#x(this.clock[start]), end = this.#x(this.clock[spans[k + 1]?.start ?? this.clock.length - 1]);
      const left = Math.max(x, NAMES - 2), right = Math.min(end, surface.width + 2);
      if (end >= NAMES && x <= surface.width) this.#paintBar(status, left, y + 2, Math.max(1, right - left));
    });
    if (this.isDim(req)) surface.fill("panel", NAMES, y, surface.width, ROW, 0.65);
  }

  #paintBar(status, x, y, width) {
    const { surface } = this, colour = BARS[status];
    if (status === "api") surface.fill(colour, x, y + 9, width, 2, 0.6);
    else if (status === "waiting") surface.frame(colour, x, y, Math.max(2, width), 11);
    else if (status === "preempted") { surface.stripes(colour, x, y, width, 11); surface.frame(colour, x, y, Math.max(2, width), 11); }
    else surface.fill(colour, x, y, width, 11);
  }

  /** Marks at round times, about one in 90 pixels. */
  #paintAxis() {
    const { surface } = this, [from, to] = this.view;
    const rough = ((to - from) * 90) / Math.max(90, surface.width - NAMES), power = 10 ** Math.floor(Math.log10(rough));
    const every = Math.max(1, [1, 2, 5, 10].map((n) => n * power).find((one) => one >= rough));
    for (let us = Math.ceil(from / every) * every; us <= to; us += every) {
      const x = this.#x(us);
      surface.fill("line", x, 0, 1, surface.height, 0.8);
      surface.text("soft", axisText(us, every), x + 3, 11, 10);
    }
  }

  #paintDeath(x) {
    const { surface } = this;
    if (x < NAMES || x > surface.width) return;
    surface.fill("warn", x - 1, 0, 2, surface.height);
    surface.text("warn", "× dead", Math.min(x + 4, surface.width - 40), AXIS + 10, 11);
  }
}

/** A time of the axis, with as many digits as its marks need. */
function axisText(us, every) {
  const [unit, scale] = every >= 1e5 ? ["s", 1e6] : every >= 100 ? ["ms", 1e3] : ["µs", 1];
  const digits = Math.max(0, Math.ceil(-Math.log10(every / scale) - 1e-9));
  return `${(us / scale).toFixed(digits)} ${unit}`;
}

/** The first place of a rising list whose value is not below this one; after the last, if there is none. */
function firstNotBelow(list, value) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
