// Part 8 of 8: time, keys and mouse. A position is a place on the common time line of all runs of the page; with one run it is the
// place of an event, with two their steps are laid side by side.

const SPEEDS = [
  ["1 step/s", 1, "step"], ["4 steps/s", 4, "step"], ["15 steps/s", 15, "step"],
  ["1 event/s", 1, "event"], ["4 events/s", 4, "event"], ["12 events/s", 12, "event"], ["40 events/s", 40, "event"],
];
const SETTLED = 250; // milliseconds without a move after which all is drawn, and the page's address names the place: browsers allow few changes of it

/**
 * The common time line: {places, marks}. `places[run][position]` is the event of that run. A step begins for all runs at the same
 * position, and its decision is complete for all at the same position; a run that is there earlier waits. `marks` are those positions:
 * {step, start, decided}. Of several engines, whose steps lie between each other, the first one's are laid side by side; one run alone
 * has marks for the steps of all.
 */
function synchronise(recordings) {
  if (recordings.length === 1) {
    const [{ events, steps }] = recordings;
    const marks = steps.map(({ step, start, decided }) => ({ step, start, decided })).sort((a, b) => a.decided - b.decided);
    return { places: [events.map(({ at }) => at)], marks };
  }
  const ofStep = recordings.map((recording) => new Map(recording.compared.map((one, k) => [one.step, stretchOf(recording, k)])));
  const steps = [...new Set(ofStep.flatMap((one) => [...one.keys()]))].sort((a, b) => a - b);
  const places = recordings.map(() => []);
  const marks = [];
  addStretch(places, recordings.map((recording) => [0, recording.compared[0]?.start ?? recording.events.length]));
  for (const step of steps) {
    const start = places[0].length;
    addStretch(places, ofStep.map((one) => one.get(step)?.slice(0, 2)));
    marks.push({ step, start, decided: places[0].length - 1 });
    addStretch(places, ofStep.map((one) => one.get(step)?.slice(1)));
  }
  return { places, marks };
}

/** The places where a step begins, where its decision is complete, and where the next step begins. */
function stretchOf(recording, k) {
  const { start, decided } = recording.compared[k];
  return [start, decided + 1, recording.compared[k + 1]?.start ?? recording.events.length];
}

/** Lay stretches of events, [first, after the last], side by side; a run without one stays where it is. */
function addStretch(places, stretches) {
  const length = Math.max(...stretches.map((stretch) => (stretch ? stretch[1] - stretch[0] : 0)));
  for (let offset = 0; offset < length; offset++) {
    stretches.forEach((stretch, run) => {
      const stays = !stretch || stretch[0] === stretch[1];
      places[run].push(stays ? places[run].at(-1) ?? 0 : Math.min(stretch[0] + offset, stretch[1] - 1));
    });
  }
}

class Player {
  constructor(recordings) {
    this.recordings = recordings;
    Object.assign(this, synchronise(recordings)); // places, marks
    this.length = this.places[0].length;
    this.position = 0;
    this.pulled = -1; // where the slider was pulled to since the last picture; -1: it was not
    this.timer = 0;
    this.only = ""; // label of the request that is shown alone
    this.panels = recordings.map((recording, run) => new Panels(recording, run, (at) => this.goTo(this.positionOf(run, at))));
    document.getElementById("runs").append(...this.panels.map((panels) => panels.root));
    document.body.classList.toggle("compare", recordings.length > 1);
    this.firstDifferent = recordings.length > 1 ? this.marks.find((mark) => stepDifference(recordings, mark.step)) : undefined;
    this.#setUpControls();
    this.#showDifference();
    this.tour = new Tour(recordings[0], (at) => this.goTo(this.positionOf(0, at)), () => this.#toTheKeys());
    this.follow(location.hash.slice(1) || recordings[0].start);
    addEventListener("hashchange", () => this.follow(location.hash.slice(1)));
  }

  // Links: `e=124` is an event, as the page counts them, `step=12` a step's decision, `req=r3` one request alone

  /** Go where a link says; without one, to the first step that has a request, not to the long start before it. */
  follow(link) {
    const asked = new URLSearchParams(link);
    const req = asked.get("req"), step = Number(asked.get("step")), event = Number(asked.get("e"));
    const [{ requests, events, firstScheduled }] = this.recordings;
    const one = req === null ? undefined : requests.find(({ id, label }) => id === req || label === req);
    if (one) {
      this.filterBox.value = one.label;
      this.#filter(one.label);
    }
    const own = one && events.findIndex(({ name, req: whose }) => name === "sched.scheduled" && requests[whose]?.id === one.id);
    if (event >= 1) this.goTo(this.positionOf(0, Math.min(Math.round(event), events.length) - 1));
    else if (step >= 1) this.goToStep(step);
    else if (own >= 0) this.goTo(this.positionOf(0, own));
    else if (!one) this.goTo(this.positionOf(0, firstScheduled));
  }

  /** Once the reader stays somewhere, the page's address leads there. A page in another one may have none. */
  #remember(whole) {
    clearTimeout(this.settling);
    const link = `#e=${this.event(0).at + 1}${this.only ? `&req=${encodeURIComponent(this.only)}` : ""}`;
    this.settling = setTimeout(() => {
      if (!whole) this.draw();
      try { history.replaceState(null, "", link); } catch { /* then there is no link */ }
    }, SETTLED);
  }

  /** Where no control takes the keys for itself. */
  #toTheKeys() {
    document.getElementById("runs").focus({ preventScroll: true });
  }

  event(run, position = this.position) {
    return this.recordings[run].events[this.places[run][position]];
  }

  /** The first position at which a run stands at this event. */
  positionOf(run, at) {
    return this.recordings.length === 1 ? at : this.places[run].indexOf(at);
  }

  /** Does an event that is to be shown happen at this position, in any run? */
  happens(position, wanted) {
    const moved = (places) => position === 0 || places[position] !== places[position - 1];
    return this.places.some((places, run) => moved(places) && wanted(this.event(run, position), run));
  }

  isShown(event, run) {
    return this.only === "" || this.recordings[run].label(event.req) === this.only;
  }

  // Moving

  goTo(position, whole = true) {
    this.pulled = -1;
    this.position = Math.min(Math.max(position, 0), this.length - 1);
    this.draw(whole);
  }

  /** A slider that is pulled says so more often than there are pictures: each picture shows the newest place, and only what the reader sees. */
  pull(position) {
    if (this.pulled < 0) requestAnimationFrame(() => { if (this.pulled >= 0) this.goTo(this.pulled, false); });
    this.pulled = position;
  }

  /** The next position in a direction with an event that is wanted; -1 if there is none. */
  findEvent(direction, wanted) {
    for (let position = this.position + direction; position >= 0 && position < this.length; position += direction) {
      if (this.happens(position, wanted)) return position;
    }
    return -1;
  }

  moveByEvent(direction) {
    const position = this.findEvent(direction, (event, run) => this.isShown(event, run));
    if (position >= 0) this.goTo(position);
    return position >= 0;
  }

  /** To where the decision of the next step, or of the one before, is complete. */
  moveByStep(direction) {
    const next = (mark) => mark.decided > this.position, before = (mark) => mark.decided < this.position;
    const mark = direction > 0 ? this.marks.find(next) : this.marks.findLast(before);
    this.goTo(mark ? mark.decided : direction > 0 ? this.length - 1 : 0);
    return Boolean(mark);
  }

  goToStep(step) {
    const mark = this.marks.find((one) => one.step >= step) ?? this.marks.at(-1);
    if (mark) this.goTo(mark.decided);
  }

  /** To the n-th output token of the request that is shown alone, or of the first request that gets so far. */
  goToToken(n) {
    const wanted = (event, run) => event.name === "sched.token" && event.args.num_output_tokens >= n && this.isShown(event, run);
    for (let position = 0; position < this.length; position++) {
      if (this.happens(position, wanted)) return this.goTo(position);
    }
    return this.say(`No request gets to token ${n}.`);
  }

  play(on = this.timer === 0) {
    clearInterval(this.timer);
    this.timer = 0;
    if (on) {
      const [, rate, unit] = SPEEDS[this.speed.value];
      if (this.position === this.length - 1) this.goTo(0);
      this.timer = setInterval(() => this.#tick(unit), 1000 / rate);
    }
    document.body.classList.toggle("playing", this.timer !== 0);
    this.playButton.textContent = this.timer ? "‖ pause" : "▶ play";
    this.announce();
  }

  #tick(unit) {
    const moved = unit === "step" ? this.moveByStep(1) : this.moveByEvent(1);
    if (!moved) this.play(false);
  }

  // Drawing

  /** `whole`: also what lies outside the window, and the words for a screen reader. */
  draw(whole = true) {
    const inList = document.activeElement?.closest?.(".list")?.closest(".run");
    this.panels.forEach((panels, run) => panels.draw(this.places[run][this.position], whole));
    inList?.querySelector(".list .now")?.focus({ preventScroll: true }); // the rows are new, the focus stays on the current one
    this.slider.value = this.position;
    this.slider.setAttribute("aria-valuetext", this.#inWords());
    this.#markStep();
    if (whole) this.announce();
    this.#remember(whole);
  }

  #inWords() {
    const event = this.event(0);
    const [{ events }] = this.recordings;
    const step = this.panels[0].stepAt(event);
    return `event ${event.at + 1} of ${events.length}, ${step ? `step ${step}` : "start"}: ${this.recordings[0].oneLine(event)}`;
  }

  /** Tell a screen reader where we are, but not while playing: that would be a flood. */
  announce() {
    if (this.timer === 0) this.say(`${this.#inWords()}. ${this.recordings[0].meaning(this.event(0))}`);
  }

  say(text) {
    document.getElementById("announcement").textContent = text;
  }

  /** With two runs: are the decisions of this step the same, and what happened in only one run? */
  #markStep() {
    if (this.recordings.length < 2) return;
    const { step } = this.marks.findLast((mark) => mark.start <= this.position) ?? { step: 0 };
    const difference = step ? stepDifference(this.recordings, step) : null;
    const since = this.firstDifferent && this.firstDifferent.step <= step ? this.firstDifferent.step : 0;
    const later = difference ? "≠ differs" : "= the same in this step";
    const words = !since ? "= the same so far" : step === since ? "≠ the first difference" : later;
    this.panels.forEach((panels, run) => panels.drawDifference(words, difference?.[run] ?? []));
  }

  #showDifference() {
    if (this.recordings.length < 2) return;
    const line = document.getElementById("difference");
    line.hidden = false;
    if (!this.firstDifferent) {
      line.textContent = "= The same decisions in every step.";
      return;
    }
    const { step, decided } = this.firstDifferent;
    const button = make("button", { type: "button", title: "to the first difference (d)" }, `≠ first difference: step ${step}`);
    button.addEventListener("click", () => this.goTo(decided));
    const first = stepDifference(this.recordings, step).map((lines, run) => `${"AB"[run]}: ${lines[0] ?? "not so"}`);
    line.replaceChildren(button, ` ${first.join("  |  ")}`);
    const sign = document.getElementById("difference-mark");
    sign.hidden = false;
    sign.style.setProperty("--at", decided / Math.max(1, this.length - 1));
  }

  // Controls

  #setUpControls() {
    const on = (id, type, act) => document.getElementById(id).addEventListener(type, act);
    this.slider = document.getElementById("slider");
    this.speed = document.getElementById("speed");
    this.filterBox = document.getElementById("filter");
    this.playButton = document.getElementById("play");
    this.searchBox = document.getElementById("search-text");
    this.slider.max = this.length - 1;
    this.speed.append(...SPEEDS.map(([text], value) => make("option", { value }, text)));
    this.speed.value = 0;
    this.#fillChoices();
    on("slider", "input", () => this.pull(Number(this.slider.value)));
    on("slider", "change", () => this.goTo(Number(this.slider.value))); // it was let go
    on("first", "click", () => this.goTo(0));
    on("last", "click", () => this.goTo(this.length - 1));
    on("event-back", "click", () => this.moveByEvent(-1));
    on("event-on", "click", () => this.moveByEvent(1));
    on("step-back", "click", () => this.moveByStep(-1));
    on("step-on", "click", () => this.moveByStep(1));
    on("play", "click", () => this.play());
    on("speed", "change", () => this.play(this.timer !== 0));
    on("filter", "change", () => this.#filter(this.filterBox.value));
    on("go", "submit", (submit) => this.#go(submit));
    on("search", "submit", (submit) => { submit.preventDefault(); this.search(1); });
    on("search-back", "click", () => this.search(-1));
    on("search-text", "input", () => this.#countFound());
    on("help", "click", () => this.#help());
    document.addEventListener("keydown", (key) => this.#key(key));
  }

  #fillChoices() {
    const labels = [...new Set(this.recordings.flatMap((recording) => recording.requests.map(({ label }) => label)))];
    const choices = labels.map((label) => make("option", { value: label }, `only ${label}`));
    this.filterBox.append(make("option", { value: "" }, "all requests"), ...choices);
    const names = [...new Set(this.recordings.flatMap((recording) => [...recording.meanings.keys()]))].sort();
    document.getElementById("event-names").append(...names.map((value) => make("option", { value })));
  }

  /** Show one request alone, and go to its first event unless the current one is its own. */
  #filter(label) {
    this.only = label;
    this.panels.forEach((panels, run) => {
      const { requests } = this.recordings[run];
      const req = requests.findIndex((one) => one.label === label);
      panels.filter(label === "" ? -1 : req < 0 ? requests.length : req); // after the last: this run has no such request
    });
    this.#countFound();
    const own = (event, run) => this.isShown(event, run);
    if (!this.recordings.some((_, run) => own(this.event(run), run))) {
      const position = this.findEvent(1, own);
      this.position = position >= 0 ? position : Math.max(0, this.findEvent(-1, own));
    }
    this.draw();
  }

  #go(submit) {
    submit.preventDefault();
    const [step, token] = ["go-step", "go-token"].map((id) => document.getElementById(id).value);
    if (token) this.goToToken(Number(token));
    else if (step) this.goToStep(Number(step));
    submit.target.reset();
    this.#toTheKeys();
  }

  #isFound(event, run) {
    const text = this.searchBox.value.trim().toLowerCase();
    return text !== "" && event.name.toLowerCase().includes(text) && this.isShown(event, run);
  }

  search(direction) {
    const position = this.findEvent(direction, (event, run) => this.#isFound(event, run));
    if (position >= 0) this.goTo(position);
    else this.say(direction > 0 ? "Nothing more found after this event." : "Nothing found before this event.");
    this.#countFound();
  }

  #countFound() {
    const events = this.recordings.flatMap((recording, run) => recording.events.filter((event) => this.#isFound(event, run)));
    document.getElementById("found").textContent = this.searchBox.value.trim() ? `${events.length} found` : "";
  }

  #help() {
    this.play(false);
    document.getElementById("help-dialog").showModal();
  }

  #changeSpeed(by) {
    this.speed.value = Math.min(Math.max(Number(this.speed.value) + by, 0), SPEEDS.length - 1);
    this.play(this.timer !== 0);
  }

  /** Keys work wherever the focus is, but a text box keeps what is typed, and a button its space. */
  #key(key) {
    if (key.ctrlKey || key.metaKey || key.altKey || document.getElementById("help-dialog").open) return;
    const at = document.activeElement;
    const typing = at instanceof HTMLInputElement && at.type !== "range";
    if (typing && key.key === "Escape") {
      key.preventDefault(); // a search box would forget its text, and `n` goes on with it
      at.blur();
    }
    if (typing && key.target.id === "search-text" && key.key === "Enter" && key.shiftKey) { key.preventDefault(); this.search(-1); }
    if (typing || (at instanceof HTMLSelectElement && key.key !== "/" && key.key !== "?")) return;
    if (key.key === " " && at instanceof HTMLButtonElement) return;
    const act = this.#keys(key.shiftKey)[key.key];
    if (!act) return;
    key.preventDefault();
    act();
  }

  #keys(shift) {
    const move = (direction) => (shift ? this.moveByStep(direction) : this.moveByEvent(direction));
    return {
      " ": () => this.play(),
      ArrowLeft: () => move(-1),
      ArrowRight: () => move(1),
      Home: () => this.goTo(0),
      End: () => this.goTo(this.length - 1),
      "-": () => this.#changeSpeed(-1),
      "+": () => this.#changeSpeed(1),
      "=": () => this.#changeSpeed(1), // the same key without shift
      f: () => this.filterBox.focus(),
      g: () => document.getElementById("go-step").focus(),
      "/": () => this.searchBox.focus(),
      n: () => this.search(1),
      p: () => this.search(-1),
      w: () => this.panels.forEach(({ timeline }) => timeline.zoom(0.5)),
      s: () => this.panels.forEach(({ timeline }) => timeline.zoom(2)),
      0: () => this.panels.forEach(({ timeline }) => timeline.showAll()),
      t: () => this.tour.move(1),
      Escape: () => this.tour.at >= 0 && this.tour.close(),
      d: () => this.firstDifferent && this.goTo(this.firstDifferent.decided),
      "?": () => this.#help(),
    };
  }
}

/** The recordings of the page: they lie in it compressed, which makes a long one a fifth as large. */
async function unpack() {
  const packed = atob(JSON.parse(document.getElementById("recordings").textContent));
  const bytes = Uint8Array.from(packed, (one) => one.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(unpacked).text()).map((data) => new Recording(data));
}

let player = null;
unpack().then((recordings) => { player = new Player(recordings); });
