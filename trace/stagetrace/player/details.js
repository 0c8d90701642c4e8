// Part 5 of 8: the lower half of a run's picture: the events around the current one, and what is known about it.

const WALK = "notebooks/pictures/walk.html";
const EVENTS_BEFORE = 7, EVENTS_AFTER = 12; // rows of the event list around the current one

/** The events around the current one, and what is known about the current one. */
class EventList {
  constructor(recording, list, event, seek) {
    Object.assign(this, { recording, list, event, seek, rows: [] });
    this.filter(-1);
  }

  /** List the events of one request alone; -1: of all. */
  filter(only) {
    this.matching = this.recording.events.filter((event) => only < 0 || event.req === only).map((event) => event.at);
  }

  draw(at) {
    const { matching } = this;
    const here = firstNotBelow(matching, at); // the current event, or the next one that is listed
    const first = Math.max(0, Math.min(here - EVENTS_BEFORE, matching.length - EVENTS_BEFORE - EVENTS_AFTER));
    const shown = matching.slice(first, first + EVENTS_BEFORE + EVENTS_AFTER);
    while (this.rows.length < shown.length) this.rows.push(this.#row());
    arrange(this.list, this.rows.slice(0, shown.length).map(({ item }) => item));
    shown.forEach((one, k) => this.#drawRow(this.rows[k], this.recording.events[one], one === at));
    this.#drawEvent(this.recording.events[at]);
  }

  /** A row of the list: it stays where it is, and shows one event after the other. */
  #row() {
    const cells = Object.fromEntries(["mark", "phase-number", "process", "name", "who"].map((name) => [name, make("span", { class: name })]));
    const button = make("button", { type: "button" }, ...Object.values(cells));
    button.addEventListener("click", () => this.seek(Number(button.dataset.at)));
    return { item: make("li", {}, button), button, cells };
  }

  #drawRow({ button, cells }, event, now) {
    button.dataset.at = event.at;
    button.classList.toggle("now", now);
    setAttribute(button, "aria-current", now ? "true" : null);
    setAttribute(button, "tabindex", now ? "0" : "-1");
    setText(cells.mark, now ? "▶" : "");
    setText(cells["phase-number"], String(event.phase || "–"));
    setText(cells.process, this.#shortName(this.recording.processes[event.process]));
    setText(cells.name, event.name + { B: " ⟨ begins", E: " ⟩ ends", i: "" }[event.ph]);
    setText(cells.who, this.recording.label(event.req));
  }

  /** The number of an engine is only said where there are several. */
  #shortName({ name }) {
    return this.recording.engines.length > 1 ? name.replace("EngineCore", "Engine") : name.replace(/_DP\d+$/, "");
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
    const { vllm } = recording.meanings.get(event.name);
    const facts = [
      ["in vLLM", vllm],
      ...this.#places(event),
      ["process", `${recording.processes[event.process].name}, ${timeText(event.us)} after the start`],
    ];
    if (event.req >= 0) {
      const { id, label } = recording.requests[event.req];
      facts.push(["request", `${label} = ${id}, ${STATUS_WORDS[recording.current.requests[event.req].status]}`]);
    }
    const texts = Object.entries(event.args).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]);
    return [...facts, ...texts];
  }

  /** The line that emitted the event, and its function in the walk through the code: links where the files are, else to be copied. */
  #places({ name, source }) {
    const { root, places, meanings } = this.recording;
    const at = `${name} ${source.replace(/:\d+$/, "")}`;
    const [folder, called, walked] = places.get(at) ?? [meanings.get(name).stage, "", ""];
    const path = [folder, source].filter(Boolean).join("/"), walk = `${WALK}#fn=${encodeURIComponent(called)}`;
    const link = (to, text) => (root ? make("a", { href: `${root}/${to}`, target: "_blank", rel: "noopener" }, text) : make("code", {}, text));
    const here = places.has(at) ? link(path.replace(/:\d+$/, ""), path) : path;
    return [["here", here], ...(walked ? [["in the walk", link(walk, root ? called : walk)]] : [])];
  }

  #link(at) {
    const event = this.recording.events[at];
    const text = `${this.recording.oneLine(event)} in ${this.recording.processes[event.process].name}, event ${at + 1}`;
    const button = make("button", { type: "button", class: "link" }, text);
    button.addEventListener("click", () => this.seek(at));
    return button;
  }
}
