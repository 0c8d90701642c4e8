"use strict";
// A position is a place in `rows`: the functions of the path, in order of first entry. Those of a feature are folded, a stretch to a
// line, until somebody opens it or goes there. What is shown comes from the data as text, never as HTML.

const SECONDS_PER_ROW = 0.7;
const DEEPEST = 8;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);

const KEYWORDS = `False|None|True|and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield`;
const PIECES = new RegExp(
  String.raw`("""[^]*?"""|'''[^]*?'''|"(?:\\[^]|[^"\\\n])*"|'(?:\\[^]|[^'\\\n])*')|(#.*)|\b(${KEYWORDS})\b`, "g");

/** For each line of a Python file its parts, as [class or "", text]. */
function coloured(text) {
  const lines = [[]];
  const put = (kind, part) => part.split("\n").forEach((piece, at) => {
    if (at) lines.push([]);
    if (piece) lines.at(-1).push([kind, piece]);
  });
  let end = 0;
  for (const match of text.matchAll(PIECES)) {
    put("", text.slice(end, match.index));
    put(["string", "comment", "keyword"][match.slice(1).findIndex(Boolean)], match[0]);
    end = match.index + match[0].length;
  }
  put("", text.slice(end));
  return lines;
}

class Walk {
  constructor(data) {
    Object.assign(this, data); // title, phases, files, lanes, arrivals, meanings, rows
    this.position = -1;
    this.timer = 0;
    this.file = -1;
    this.rows.forEach((row) => { row.depth = this.depthOf(row); });
    this.folds = this.foldsOf();
    byId("title").textContent = this.title;
    byId("slider").max = this.rows.length - 1;
    this.drawPhases();
    this.drawList();
    this.setUpControls();
    const asked = location.hash;
    if (this.placeOf(asked) < 0) this.goTo(this.ends()[0]);
    this.follow(asked);
  }

  /** How many callers of the same lane and phase are above it; above the walk's own, those on the walk. */
  depthOf(row) {
    let above = this.rows[row.caller];
    while (above?.room && !row.room) above = this.rows[above.caller];
    return above && above.lane === row.lane && above.phase === row.phase ? Math.min(above.depth + 1, DEEPEST) : 0;
  }

  /** Stretches of rows of one feature, and in each of their rows which one it is in. */
  foldsOf() {
    const folds = [];
    this.rows.forEach((row, place) => {
      const before = this.rows[place - 1];
      if (!row.room) return;
      if (before?.room !== row.room || before.phase !== row.phase || before.lane !== row.lane) folds.push({ room: row.room, calls: 0, items: [] });
      row.fold = folds.at(-1);
      row.fold.calls += Math.max(1, row.calls); // what was running already went on once at least
    });
    return folds;
  }

  isFolded({ fold }) {
    return fold !== undefined && fold.button.getAttribute("aria-expanded") === "false";
  }

  /** The first and the last row that are not folded; where all are, of all. */
  ends() {
    const open = this.rows.map((row, at) => at).filter((at) => !this.isFolded(this.rows[at]));
    return [open[0] ?? 0, open.at(-1) ?? this.rows.length - 1];
  }

  /** The place of the function that `#fn=Scheduler.schedule` names: the whole name first, else its last part; -1 if it is not here. */
  placeOf(hash) {
    const name = this.nameIn(hash);
    if (!name) return -1;
    const whole = this.rows.findIndex((row) => row.name === name);
    return whole >= 0 ? whole : this.rows.findIndex((row) => row.name.endsWith(`.${name}`));
  }

  nameIn(hash) {
    const value = hash.startsWith("#fn=") ? hash.slice("#fn=".length) : "";
    try { return decodeURIComponent(value); } catch { return value; } // a broken escape: take it as it stands
  }

  /** To the function of a link; one that is not on this path is named, and the page stays where it is. */
  follow(hash) {
    const place = this.placeOf(hash);
    this.showFound(); // no longer that another one is missing
    if (place >= 0) return this.goTo(place, false);
    if (!this.nameIn(hash)) return undefined;
    byId("found").textContent = `no ${this.nameIn(hash)} on this path`;
    return this.say(byId("found").textContent);
  }

  // Drawing

  drawPhases() {
    for (const [phase, name] of Object.entries(this.phases)) {
      const button = make("button", { type: "button", "data-phase": phase, style: `--phase: var(--p${phase})` }, `${phase} ${name}`);
      button.addEventListener("click", () => this.goTo(this.firstOf(Number(phase))));
      byId("phases").append(make("li", {}, button));
    }
  }

  drawList() {
    let phase = 0, lane = -1;
    const list = byId("rows");
    this.buttons = this.rows.map((row, place) => {
      const colour = `--phase: var(--p${row.phase})`;
      if (row.phase !== phase) list.append(make("li", { class: "phase", style: colour }, `${row.phase} ${this.phases[row.phase]}`));
      if (row.phase !== phase || row.lane !== lane) list.append(make("li", { class: "lane" }, `${this.lanes[row.lane]} ${this.arrivals[place] ?? ""}`));
      ({ phase, lane } = row);
      if (row.fold?.items.length === 0) list.append(this.foldLine(row.fold, colour));
      const what = make("span", { class: "what", style: `--depth: ${row.depth}` }, row.name);
      const calls = make("span", { class: "calls" }, row.calls ? `×${row.calls}` : "↻");
      const button = make("button", { type: "button", style: colour, title: `${this.files[row.file].name}:${row.line}` }, calls, what,
        make("span", { class: "tells" }, Object.keys(row.events).join(", ")));
      button.addEventListener("click", () => this.goTo(place));
      const item = make("li", {}, button);
      item.hidden = row.fold !== undefined;
      row.fold?.items.push(item);
      list.append(item);
      return button;
    });
  }

  foldLine(fold, colour) {
    const words = `${fold.calls} call${fold.calls > 1 ? "s" : ""} in ${fold.room}`;
    fold.button = make("button", { type: "button", class: "fold", style: colour, "aria-expanded": "false" }, make("span", { class: "calls" }), words);
    fold.button.addEventListener("click", () => this.open([fold], this.isFolded({ fold })));
    return make("li", {}, fold.button);
  }

  open(folds, open = true) {
    for (const { button, items } of folds) {
      button.setAttribute("aria-expanded", open);
      for (const item of items) item.hidden = !open;
    }
  }

  /** Of a phase, the first row that is not folded, or else the first. */
  firstOf(phase) {
    const own = this.rows.map((row, at) => at).filter((at) => this.rows[at].phase === phase);
    return own.find((at) => !this.isFolded(this.rows[at])) ?? own[0];
  }

  drawSource(row) {
    const file = this.files[row.file];
    if (this.file !== row.file) {
      const ran = new Set(file.ran);
      this.lines = coloured(file.text).map((parts, at) => make("div", ran.has(at + 1) ? { class: "ran" } : {},
        ...parts.map(([kind, part]) => (kind ? make("span", { class: kind }, part) : part))));
      byId("source").replaceChildren(...this.lines);
      this.file = row.file;
    }
    this.lines.forEach((line, at) => {
      const inside = at + 1 >= row.line && at + 1 <= row.last;
      line.classList.toggle("in", inside);
      line.classList.toggle("out", !inside);
    });
    const top = this.lines[row.line - 1];
    byId("source").scrollTop = top ? top.offsetTop - byId("source").offsetTop - 40 : 0;
  }

  drawAbout(row, place) {
    const file = this.files[row.file].name;
    byId("name").textContent = row.name;
    byId("where").textContent = `${file}:${row.line}`;
    const times = row.calls === 0 ? "was running already" : row.calls === 1 ? "called once" : `called ${row.calls} times`;
    byId("how").textContent = `phase ${row.phase} · ${this.lanes[row.lane]} · ${times}, first at ${row.at} ms`;
    const facts = byId("facts");
    facts.replaceChildren();
    const add = (name, ...what) => what.length && facts.append(make("dt", {}, name), make("dd", {}, ...what));
    for (const [name, value] of Object.entries(row.arguments)) add(name, make("code", {}, value));
    if (row.result && row.result !== "None") add("returns", make("code", {}, row.result));
    for (const [name, count] of Object.entries(row.events)) add(`${name}${count > 1 ? ` ×${count}` : ""}`, this.meanings[name] ?? "");
    const below = this.rows.map((one, at) => at).filter((at) => this.rows[at].caller === place);
    add("called by", ...(row.caller >= 0 ? [this.link(row.caller)] : []));
    add("calls", ...below.map((at) => this.link(at)));
  }

  link(place) {
    const button = make("button", { type: "button", class: "link" }, this.rows[place].name);
    button.addEventListener("click", () => this.goTo(place));
    return button;
  }

  goTo(place, remember = true) {
    const next = Math.min(Math.max(place, 0), this.rows.length - 1);
    if (next === this.position) return;
    this.buttons[this.position]?.removeAttribute("aria-current");
    this.position = next;
    const row = this.rows[next];
    if (this.isFolded(row)) this.open([row.fold]);
    document.body.style.setProperty("--phase", `var(--p${row.phase})`);
    this.buttons[next].setAttribute("aria-current", "true");
    this.buttons[next].scrollIntoView({ block: "center" });
    document.querySelectorAll("#phases button").forEach((button) => {
      if (Number(button.dataset.phase) === row.phase) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
    });
    this.drawAbout(row, next);
    this.drawSource(row);
    byId("slider").value = next;
    byId("slider").setAttribute("aria-valuetext", `${next + 1} of ${this.rows.length}: ${row.name}`);
    if (this.timer === 0) this.say(`${next + 1} of ${this.rows.length}: ${row.name}, phase ${row.phase}`);
    if (remember) this.remember(row);
  }

  /** A link to this function; a page inside another one may have no history. */
  remember(row) {
    try { history.replaceState(null, "", `#fn=${encodeURIComponent(row.name)}`); } catch { /* then there is no link */ }
  }

  say(text) {
    byId("announcement").textContent = text;
  }

  // Moving

  /** To the next row in a direction that is not folded. */
  move(by) {
    for (let at = this.position + by; at >= 0 && at < this.rows.length; at += by) {
      if (!this.isFolded(this.rows[at])) return this.goTo(at);
    }
    return undefined;
  }

  /** The slider and the keys for the ends lead to rows that are not folded. */
  slide(place) {
    const [first, last] = this.ends();
    let at = place;
    while (at < last && this.isFolded(this.rows[at])) at += 1;
    this.goTo(Math.min(Math.max(at, first), last));
    byId("slider").value = this.position;
  }

  /** To the first function of the next phase; back: to the first of this one, or of the one before. */
  movePhase(direction) {
    const firsts = Object.keys(this.phases).map((phase) => this.firstOf(Number(phase)));
    const there = direction > 0 ? firsts.find((at) => at > this.position) : firsts.findLast((at) => at < this.position);
    this.goTo(there ?? this.ends()[direction > 0 ? 1 : 0]);
  }

  play(on = this.timer === 0) {
    clearInterval(this.timer);
    this.timer = 0;
    if (on) {
      if (this.position >= this.ends()[1]) this.goTo(this.ends()[0]);
      this.timer = setInterval(() => {
        this.move(1);
        if (this.position >= this.ends()[1]) this.play(false);
      }, 1000 * SECONDS_PER_ROW);
    }
    byId("play").textContent = this.timer ? "‖ pause" : "▶ play";
  }

  /** For each row whether the text is found: in the names of functions and files; where none has it in those of events, then in arguments. */
  found() {
    const text = byId("search-text").value.trim().toLowerCase();
    const places = [
      (row) => [row.name, this.files[row.file].name], (row) => Object.keys(row.events), (row) => Object.entries(row.arguments).flat(),
    ];
    const has = (words) => text !== "" && words.some((word) => word.toLowerCase().includes(text));
    const all = places.map((words) => this.rows.map((row) => has(words(row))));
    return all.find((one) => one.includes(true)) ?? all[0];
  }

  search(direction) {
    const found = this.found();
    for (let at = this.position + direction; at >= 0 && at < this.rows.length; at += direction) {
      if (found[at]) return this.goTo(at);
    }
    return this.say(direction > 0 ? "Nothing more found below." : "Nothing found above.");
  }

  showFound() {
    const found = this.found();
    found.forEach((is, at) => this.buttons[at].classList.toggle("found", is));
    byId("found").textContent = byId("search-text").value.trim() ? `${found.filter(Boolean).length} found` : "";
  }

  // Controls

  setUpControls() {
    const on = (id, type, act) => byId(id).addEventListener(type, act);
    on("slider", "input", () => this.slide(Number(byId("slider").value)));
    on("first", "click", () => this.slide(0));
    on("last", "click", () => this.slide(this.rows.length - 1));
    on("features", "click", () => this.open(this.folds, this.folds.some((fold) => this.isFolded({ fold }))));
    on("back", "click", () => this.move(-1));
    on("on", "click", () => this.move(1));
    on("phase-back", "click", () => this.movePhase(-1));
    on("phase-on", "click", () => this.movePhase(1));
    on("play", "click", () => this.play());
    on("search", "submit", (submit) => { submit.preventDefault(); this.search(1); });
    on("search-back", "click", () => this.search(-1));
    on("search-text", "input", () => this.showFound());
    window.addEventListener("hashchange", () => this.follow(location.hash));
    document.addEventListener("keydown", (key) => this.key(key));
  }

  key(key) {
    if (key.ctrlKey || key.metaKey || key.altKey) return;
    const at = document.activeElement;
    const typing = at === byId("search-text");
    if (typing && key.key === "Escape") { key.preventDefault(); at.blur(); } // a search box would forget its text, and `n` goes on with it
    if (typing && key.key === "Enter" && key.shiftKey) { key.preventDefault(); this.search(-1); }
    if (typing || (key.key === " " && at instanceof HTMLButtonElement)) return;
    const act = {
      " ": () => this.play(),
      ArrowLeft: () => (key.shiftKey ? this.movePhase(-1) : this.move(-1)),
      ArrowRight: () => (key.shiftKey ? this.movePhase(1) : this.move(1)),
      ArrowUp: () => this.move(-1),
      ArrowDown: () => this.move(1),
      Home: () => this.slide(0),
      End: () => this.slide(this.rows.length - 1),
      f: () => byId("features").click(),
      "/": () => byId("search-text").focus(),
      n: () => this.search(1),
      p: () => this.search(-1),
    }[key.key];
    if (!act) return;
    key.preventDefault();
    act();
  }
}

const walk = new Walk(JSON.parse(byId("data").textContent));
