// Part 2 of 8: how the page is drawn. Everything that comes from a recording enters it as text, never as HTML. What has thousands of parts is drawn on a canvas, where a part costs no element: the block map, and the requests over time.

const MAX_CELLS = 16384; // blocks that are drawn one by one
const DENSE = 256; // blocks from which on they are small, and without names
const LONG = 40; // elements of a list, from which on those that nobody sees are drawn later
const FONT_SIZE = 12; // pixels
const STATUS_WORDS = {
  unknown: "not seen yet", api: "in the API server", waiting: "waiting", prefill: "prefill", decode: "decode", preempted: "preempted",
  done: "ended",
};

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

// An element is touched only where it looks different from before: the browser lays out again whatever was touched.

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** null: without the attribute. */
function setAttribute(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Make these elements the children, in this order; who is in its place stays there. */
function arrange(parent, items) {
  let place = 0, child = parent.firstElementChild;
  for (; place < items.length && child === items[place]; place++) child = child.nextElementSibling;
  const stay = new Set(items.slice(place));
  for (let next; child; child = next) {
    next = child.nextElementSibling;
    if (!stay.has(child)) child.remove();
  }
  for (; place < items.length; place++) {
    if (parent.children[place] !== items[place]) parent.insertBefore(items[place], parent.children[place] ?? null);
  }
}

/** The children of an element, each with a key and a look; one is made again only if its look has changed. */
class Items {
  constructor(parent) {
    this.parent = parent;
    this.known = new Map(); // key -> {look, element}
  }

  /** `entries`: [key, look, a function that makes the element]. */
  draw(entries) {
    const before = this.known;
    this.known = new Map(entries.map(([key, look, create]) => {
      const one = before.get(key);
      return [key, one?.look === look ? one : { look, element: create() }];
    }));
    arrange(this.parent, [...this.known.values()].map(({ element }) => element));
  }
}

/** The elements of a list that scrolls: of a long one only those that are seen are drawn at once, the others when the reader stays somewhere. */
class Seen {
  /** `draw(element)` makes it say what is true now, and costs nothing if it does already. */
  constructor(list, draw) {
    Object.assign(this, { draw, seen: new Set(), watched: new WeakSet(), settling: 0 });
    this.observer = new IntersectionObserver((changes) => {
      for (const { target, isIntersecting } of changes) {
        this.seen[isIntersecting ? "add" : "delete"](target);
        if (isIntersecting && target.isConnected) draw(target);
      }
    }, { root: list, rootMargin: "60px" });
  }

  drawAll(elements) {
    clearTimeout(this.settling);
    const long = elements.length > LONG;
    for (const element of elements) {
      const known = this.watched.has(element);
      if (!long || !known || this.seen.has(element)) this.draw(element);
      if (known) continue;
      this.watched.add(element);
      this.observer.observe(element);
    }
    if (long) this.settling = setTimeout(() => elements.forEach(this.draw), SETTLED);
  }
}

/** A canvas that is as wide as its element. `layOut(width)` says how high it is, `paint(context)` draws all of it. */
class Surface {
  constructor(element, layOut, paint) {
    Object.assign(this, { element, layOut, paint, width: 0, height: 0, colours: new Map() });
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.context = this.canvas.getContext("2d");
    element.append(this.canvas);
    new ResizeObserver(() => requestAnimationFrame(() => this.resize())).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.colours.clear(); this.resize(true); });
  }

  /** Look at the element's width again, and draw everything if it has changed. */
  resize(always = false) {
    const width = this.element.clientWidth;
    if (!always && width === this.width) return;
    this.width = width;
    this.height = this.layOut(width);
    const dots = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * dots);
    this.canvas.height = Math.round(this.height * dots);
    this.canvas.style.height = `${this.height}px`;
    this.context.font = `500 ${FONT_SIZE}px system-ui, "Segoe UI", "DejaVu Sans", sans-serif`;
    this.context.setTransform(dots, 0, 0, dots, 0, 0);
    this.paint(this.context);
  }

  /** The style sheet's colour of this name; asking for it each time would cost more than drawing. */
  colour(name) {
    if (!this.colours.has(name)) this.colours.set(name, getComputedStyle(this.element).getPropertyValue(`--${name}`).trim());
    return this.colours.get(name);
  }

  fill(name, x, y, width, height, strength = 1) {
    const { context } = this;
    context.globalAlpha = strength;
    context.fillStyle = this.colour(name);
    context.fillRect(x, y, width, height);
    context.globalAlpha = 1;
  }

  frame(name, x, y, width, height, line = 1) {
    const { context } = this;
    context.strokeStyle = this.colour(name);
    context.lineWidth = line;
    context.strokeRect(x + line / 2, y + line / 2, width - line, height - line);
  }

  /** Stripes from bottom left to top right, `gap` apart. */
  stripes(name, x, y, width, height, gap = 5) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.clip();
    context.strokeStyle = this.colour(name);
    context.lineWidth = 1.5;
    context.beginPath();
    for (let from = x - height - ((x - height) % gap); from < x + width; from += gap) {
      context.moveTo(from, y + height);
      context.lineTo(from + height, y);
    }
    context.stroke();
    context.restore();
  }

  /** All sizes are of one font: to set another makes the browser compute the styles of the whole page. */
  text(name, words, x, y, size, align = "left") {
    const { context } = this;
    context.fillStyle = this.colour(name);
    context.textAlign = align;
    context.save();
    context.translate(x, y);
    context.scale(size / FONT_SIZE, size / FONT_SIZE);
    context.fillText(words, 0, 0);
    context.restore();
  }
}

/** The KV cache: one cell per block, and only cells that look different from before are drawn again. */
class BlockMap {
  /** `engine`: its process. */
  constructor(recording, element, engine) {
    Object.assign(this, { recording, element, only: -1 });
    const last = recording.stateAt(recording.events.length - 1).engines[engine];
    this.total = Math.max(last.usable + 1, recording.numBlocks[engine]);
    this.count = Math.min(this.total, MAX_CELLS);
    this.looks = new Float64Array(this.count); // what is drawn of each
    this.blocks = []; // the engine's, as they are now
    this.drawn = []; // as they were drawn last, and which of them had a frame because the event changed them
    this.changed = new Set();
    this.surface = new Surface(element, (width) => this.#layOut(width), () => this.#drawAll());
    element.addEventListener("pointermove", (move) => { element.title = this.cellWords(this.#idAt(move)); });
  }

  /** `engine`: its state; `event` is its own; `whole`: in words too. A block's state is replaced when it changes, never changed. */
  draw(engine, requests, event, only, whole) {
    const { args } = event;
    const named = [...(args.blocks ?? []), ...(args.new_blocks ?? []), event.name === "kv.evicted" ? args.block : -1];
    const changed = new Set(named);
    const before = only === this.only ? this.drawn : [];
    this.drawn = engine.blocks.slice(0, this.count);
    this.blocks = engine.blocks;
    this.only = only;
    for (let id = 0; id < this.count; id++) {
      if (before[id] === this.drawn[id] && !changed.has(id) && !this.changed.has(id)) continue;
      const look = this.#look(id, changed.has(id));
      if (look === this.looks[id]) continue;
      this.looks[id] = look;
      this.#drawCell(id);
    }
    this.changed = changed;
    this.element.dataset.free = engine.usable - engine.held;
    if (!whole) return;
    const holdings = engine.running.map((req) => `${this.recording.label(req)} holds ${requests[req].blocks.join(", ") || "none"}`);
    setAttribute(this.element, "aria-label", `${this.words(engine)}. ${holdings.join("; ")}`);
  }

  words(engine) {
    if (engine.usable === 0) return engine.dead ? "gone" : "not allocated yet";
    const drawn = this.total > this.count ? `, the first ${this.count} are drawn` : "";
    return `${engine.usable - engine.held} of ${engine.usable} free${drawn}`;
  }

  /** The requests that hold a block, by name. */
  holders(id) {
    return (this.blocks[id] ?? FREE).holders.map((req) => this.recording.label(req));
  }

  isCached(id) {
    return (this.blocks[id] ?? FREE).cached;
  }

  cellWords(id) {
    if (id < 0) return "";
    const names = this.holders(id);
    const held = names.length ? `held by ${names.join(", ")}` : id === 0 ? "padding, never given away" : "free";
    return `block ${id}: ${held}${this.isCached(id) ? ", in the prefix cache" : ""}`;
  }

  /** All that is seen of a block as one number: the first holder, how many there are, and three yes or no. */
  #look(id, changed) {
    const { holders, cached } = this.blocks[id] ?? FREE;
    const dim = holders.length > 0 && this.only >= 0 && !holders.includes(this.only);
    const first = holders.length ? holders[0] + 1 : 0;
    return ((first * 64 + Math.min(holders.length, 63)) * 2 + Number(cached)) * 4 + Number(changed) * 2 + Number(dim);
  }

  /** Cells as wide as names need; many of them so small that all are seen at once. Returns the height. */
  #layOut(width) {
    if (this.count <= DENSE) {
      const narrowest = Math.max(36, this.recording.nameWidth * 8 + 8);
      this.columns = Math.max(1, Math.floor((width + 3) / (narrowest + 3)));
      Object.assign(this, { gap: 3, wide: Math.floor((width + 3) / this.columns) - 3, high: 28 });
    } else {
      let side = 14;
      while (side > 3 && Math.ceil(this.count / Math.floor(width / side)) * side > 320) side -= 1;
      this.columns = Math.max(1, Math.floor(width / side));
      Object.assign(this, { gap: 1, wide: side - 1, high: side - 1 });
    }
    return Math.ceil(this.count / this.columns) * (this.high + this.gap);
  }

  #idAt({ offsetX, offsetY }) {
    const column = Math.floor(offsetX / (this.wide + this.gap)), row = Math.floor(offsetY / (this.high + this.gap));
    const id = row * this.columns + column;
    return column < this.columns && row >= 0 && id < this.count ? id : -1;
  }

  #drawAll() {
    for (let id = 0; id < this.count; id++) this.#drawCell(id);
  }

  #drawCell(id) {
    if (!this.surface.width) return; // nobody sees it yet
    const { surface, wide, high, gap } = this;
    const edge = gap > 1 ? 1 : 0; // whole pixels, and none of a neighbour's
    const look = this.looks[id];
    const dim = look % 2 === 1, changed = Math.floor(look / 2) % 2 === 1;
    const x = (id % this.columns) * (wide + gap), y = Math.floor(id / this.columns) * (high + gap);
    surface.fill("panel", x - edge, y - edge, wide + 2 * edge, high + 2 * edge);
    this.#drawState(id, x, y);
    if (dim) surface.fill("panel", x, y, wide, high, 0.65);
    if (changed) surface.frame("accent", x - edge, y - edge, wide + 2 * edge, high + 2 * edge, edge ? 3 : 2);
  }

  #drawState(id, x, y) {
    const { surface, wide, high } = this;
    const { holders, cached } = this.blocks[id] ?? FREE;
    const held = holders.length > 0, small = this.count > DENSE;
    if (id === 0) surface.fill("well", x, y, wide, high);
    if (held) surface.fill(`hue-${holders[0] % 7}`, x, y, wide, high, parseFloat(surface.colour("mix")) / 100);
    if (!held && cached) surface.stripes("soft", x, y, wide, high, small ? 3 : 6);
    if (!small || wide > 5 || !held) surface.frame(held ? "text" : "line", x, y, wide, high, small && !held ? 0.5 : 1);
    if (held && cached) surface.fill("text", x, y + high - (small ? Math.max(1, high / 5) : 4), wide, small ? Math.max(1, high / 5) : 3);
    if (small) return;
    surface.text(held ? "text" : "soft", String(id), x + 3, y + 9, 9);
    const sign = id === 0 ? "–" : this.#sign(this.holders(id), cached);
    surface.text("text", sign, x + wide / 2, y + 22, 12, "center");
  }

  /** The text of a cell. Of a name that is too long, the end: names differ there more often. */
  #sign(names, cached) {
    if (names.length === 0) return cached ? "c" : "";
    if (names.length > 1) return `${names.length}×`;
    const room = this.recording.nameWidth;
    return names[0].length > room ? `…${names[0].slice(1 - room)}` : names[0];
  }
}
