// Part 3 of 3: time, keys and mouse. A position is a place on the common time line of all runs of the page; with one run it is the
// place of an event, with two their steps are laid side by side.

const SPEEDS = [["1 event/s", 1, "event"], ["4 events/s", 4, "event"], ["12 events/s", 12, "event"], ["40 events/s", 40, "event"], ["1 step/s", 1, "step"], ["4 steps/s", 4, "step"], ["15 steps/s", 15, "step"]];

/**
 * The common time line: {places, marks, decided}. `places[run][position]` is the event of that run; a step begins for all runs at the same
 * position, and who is done with it earlier waits at its last event. `marks` are the positions where steps begin, {step, start, decided}.
 */
function synchronise(recordings) {
  const starts = recordings.map((recording) => new Map(recording.steps.map((one, k) => [one.step, k])));
  const steps = [...new Set(recordings.flatMap((recording) => recording.steps.map((one) => one.step)))].sort((a, b) => a - b);
  const places = recordings.map(() => []);
  const marks = [];
  addStretch(recordings, places, recordings.map((recording) => [0, recording.steps[0]?.start ?? recording.events.length]));
  for (const step of steps) {
    const start = places[0].length;
    const stretches = recordings.map((recording, run) => stretchOf(recording, starts[run].get(step)));
    const decided = Math.max(...recordings.map((recording, run) => (starts[run].has(step) ? recording.steps[starts[run].get(step)].decided - stretches[run][0] : 0)));
    addStretch(recordings, places, stretches);
    marks.push({ step, start, decided: start + decided });
  }
  return { places, marks };
}

/** The events of a step, [first, behind the last]; null where a run has no such step. */
function stretchOf(recording, k) {
  return k === undefined ? null : [recording.steps[k].start, recording.steps[k + 1]?.start ?? recording.events.length];
}

function addStretch(recordings, places, stretches) {
  const length = Math.max(...stretches.map((stretch) => (stretch ? stretch[1] - stretch[0] : 0)));
  for (let offset = 0; offset < length; offset++) {
    stretches.forEach((stretch, run) => {
      const last = places[run].at(-1) ?? 0;
      places[run].push(stretch && stretch[1] > stretch[0] ? Math.min(stretch[0] + offset, stretch[1] - 1) : last);
    });
  }
}

class Player {
  constructor(recordings) {
    this.recordings = recordings;
    Object.assign(this, synchronise(recordings)); // places, marks
    this.length = this.places[0].length;
    this.position = 0;
    this.timer = 0;
    this.only = ""; // label of the request that is shown alone
    this.panels = recordings.map((recording, run) => new Panels(recording, run, (at) => this.goTo(this.positionOf(run, at))));
    document.getElementById("runs").append(...this.panels.map((panels) => panels.root));
    document.body.classList.toggle("compare", recordings.length > 1);
    this.difference = recordings.length > 1 ? firstDifference(...recordings) : null;
    this.#setUpControls();
    this.#showDifference();
    this.draw();
  }

  event(run, position = this.position) {
    return this.recordings[run].events[this.places[run][position]];
  }

  /** The first position at which a run stands at this event. */
  positionOf(run, at) {
    return this.places[run].indexOf(at);
  }

  /** Does an event that is to be shown happen at this position, in any run? */
  happens(position, wanted) {
    return this.recordings.some((_, run) => (position === 0 || this.places[run][position] !== this.places[run][position - 1]) && wanted(this.event(run, position), run));
  }

  isShown(event, run) {
    return this.only === "" || this.recordings[run].label(event.req) === this.only;
  }

  // Moving

  goTo(position) {
    this.position = Math.min(Math.max(position, 0), this.length - 1);
    this.draw();
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
    const marks = direction > 0 ? this.marks.filter((mark) => mark.decided > this.position) : this.marks.filter((mark) => mark.decided < this.position);
    const mark = direction > 0 ? marks[0] : marks.at(-1);
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
    return this.say(`Nobody gets to token ${n}.`);
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

  draw() {
    const inList = document.activeElement?.closest?.(".list")?.closest(".run");
    this.panels.forEach((panels, run) => panels.draw(this.places[run][this.position]));
    inList?.querySelector(".list .now")?.focus({ preventScroll: true }); // the rows are new, the focus stays on the current one
    this.slider.value = this.position;
    this.slider.setAttribute("aria-valuetext", this.#inWords());
    this.#markSteps();
    this.announce();
  }

  #inWords() {
    const event = this.event(0);
    const step = this.panels[0].recording.current.step;
    return `event ${event.at + 1} of ${this.recordings[0].events.length}, ${step ? `step ${step}` : "start"}: ${event.name} ${this.recordings[0].label(event.req)}`;
  }

  /** Tell a screen reader where we are; not while playing, which would be a flood. */
  announce() {
    if (this.timer === 0) this.say(`${this.#inWords()}. ${this.panels[0].meaning(this.event(0))}`);
  }

  say(text) {
    document.getElementById("announcement").textContent = text;
  }

  #markSteps() {
    if (this.recordings.length < 2) return;
    const mark = this.marks.findLast((one) => one.start <= this.position);
    const words = !this.difference || !mark || mark.step < this.difference.step ? "= same decisions so far" : mark.step === this.difference.step ? "≠ first difference, in this step" : "≠ differs since step " + this.difference.step;
    for (const panels of this.panels) {
      panels.find(".run-same").hidden = false;
      panels.find(".run-same").textContent = words;
    }
  }

  #showDifference() {
    if (this.recordings.length < 2) return;
    const line = document.getElementById("difference");
    line.hidden = false;
    if (!this.difference) {
      line.textContent = "= The same decisions in every step.";
      return;
    }
    const { step, only, order } = this.difference;
    const parts = only.map((lines, run) => `${"AB"[run]}: ${lines.join("; ") || "nothing of its own"}`);
    const mark = this.marks.find((one) => one.step === step);
    const button = make("button", { type: "button", title: "to the first difference (d)" }, `≠ first difference: step ${step}`);
    button.addEventListener("click", () => this.goTo(mark.decided));
    line.replaceChildren(button, order ? " the same, in another order" : ` ${parts.join(" | ")}`);
    const sign = document.getElementById("difference-mark");
    sign.hidden = false;
    sign.style.setProperty("--at", mark.decided / Math.max(1, this.length - 1));
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
    this.speed.value = 1;
    this.#fillChoices();
    on("slider", "input", () => this.goTo(Number(this.slider.value)));
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
    this.filterBox.append(make("option", { value: "" }, "all requests"), ...labels.map((label) => make("option", { value: label }, `only ${label}`)));
    const names = [...new Set(this.recordings.flatMap((recording) => [...recording.meanings.keys()]))].sort();
    document.getElementById("event-names").append(...names.map((value) => make("option", { value })));
  }

  /** Show one request alone, and go to its first event unless the current one is its own. */
  #filter(label) {
    this.only = label;
    this.panels.forEach((panels, run) => panels.filter(label === "" ? -1 : this.recordings[run].requests.findIndex((one) => one.label === label)));
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
  }

  #isFound(event, run) {
    const text = this.searchBox.value.trim().toLowerCase();
    return text !== "" && event.name.toLowerCase().includes(text) && this.isShown(event, run);
  }

  search(direction) {
    const position = this.findEvent(direction, (event, run) => this.#isFound(event, run));
    if (position >= 0) this.goTo(position);
    else this.say(direction > 0 ? "Nothing more is found behind this event." : "Nothing is found before this event.");
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

  /** Keys work wherever the focus is, but a text box keeps what one types with, and a button its space. */
  #key(key) {
    if (key.ctrlKey || key.metaKey || key.altKey || document.getElementById("help-dialog").open) return;
    const at = document.activeElement;
    const typing = at instanceof HTMLInputElement && at.type !== "range";
    if (typing && key.key === "Escape") at.blur();
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
      d: () => this.difference && this.goTo(this.marks.find((one) => one.step === this.difference.step).decided),
      "?": () => this.#help(),
    };
  }
}

const player = new Player(JSON.parse(document.getElementById("recordings").textContent).map((data) => new Recording(data)));
