// Part 7 of 8: nine stops, one per phase, each at an event of this recording.

const STOPS = [
  "The command line is read: which subcommand, which flags. Nothing heavy is loaded yet.",
  "`serve` decides what to start: one API server, several, or engines alone.",
  "The socket is bound before the engine exists; the flags become one configuration, and the routes are put together.",
  "The engine's front end is made: tokenizer, input and output processors, and the client that talks to the engine's process.",
  "The engine's own process starts: it loads the model, finds how many KV-cache blocks fit into memory, and reports over ZMQ that it is ready.",
  "A request arrives over HTTP: it is checked, its prompt becomes tokens, its fields become sampling parameters.",
  "The request crosses to the engine's process as one ZMQ message and joins the waiting queue.",
  "Step after step the scheduler shares out its token budget, the model computes those tokens, and the sampler draws the next ones.",
  "New tokens come back to the front end, become text, and leave for the client as JSON or as a server-sent event.",
];

class Tour {
  /** `goTo(place of an event)` of this recording; `done()` gives the focus back. */
  constructor(recording, goTo, done) {
    Object.assign(this, { goTo, done, at: -1, bar: document.getElementById("tour") });
    this.stops = STOPS.map((words, k) => ({ words, phase: k + 1, place: this.#placeOf(recording, k + 1) })).filter(({ place }) => place >= 0);
    const on = (id, act) => document.getElementById(id).addEventListener("click", act);
    on("tour-start", () => this.move(1));
    on("tour-back", () => this.move(-1));
    on("tour-on", () => this.move(1));
    on("tour-end", () => this.close());
    document.getElementById("tour-start").disabled = this.stops.length === 0;
  }

  /** Where a phase is seen first; the later ones with the request that is scheduled first, so that the tour follows one. */
  #placeOf({ events, firstScheduled }, phase) {
    if (phase === 8 && events[firstScheduled].phase === 8) return firstScheduled;
    const { req } = events[firstScheduled];
    const own = phase > 5 ? events.findIndex((event) => event.phase === phase && event.req === req && req >= 0) : -1;
    return own >= 0 ? own : events.findIndex((event) => event.phase === phase);
  }

  move(by) {
    const next = this.at + by;
    if (next < 0 || this.stops.length === 0) return;
    if (next >= this.stops.length) return this.close();
    this.at = next;
    this.bar.hidden = false;
    const { words, phase, place } = this.stops[next];
    setText(document.getElementById("tour-stop"), `${phase} ${PHASES[phase - 1]}`);
    setText(document.getElementById("tour-words"), ` ${words}`);
    setText(document.getElementById("tour-count"), ` stop ${next + 1} of ${this.stops.length}`);
    document.getElementById("tour-back").disabled = next === 0;
    setText(document.getElementById("tour-on"), next === this.stops.length - 1 ? "end of the tour" : "next stop ›");
    return this.goTo(place);
  }

  close() {
    this.at = -1;
    this.bar.hidden = true;
    this.done();
  }
}
