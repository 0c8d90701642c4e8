// Part 5 of 9: going back. What an engine told is kept for a while, and any of its steps is shown again by applying it again.

const STEPS_PER_PART = 64; // what is applied again, at most, to show one step
const PARTS_KEPT = 16;
const EVENTS_KEPT = 60_000; // of one engine

class History {
  constructor() {
    this.parts = []; // {before: the state in which it begins, events, steps: how many it decides}
    this.first = 0; // the first step that is kept, counted from when this page began to watch
    this.count = 0; // all steps so far
    this.isCut = false;
  }

  #size = 0; // events

  /** Keep an event that `state` is about to apply. */
  note(state, event) {
    if (!this.parts.length || this.parts.at(-1).steps === STEPS_PER_PART || this.isCut) this.#begin(state);
    const part = this.parts.at(-1);
    part.events.push(event);
    this.#size += 1;
    if (event.name !== "sched.output") return;
    part.steps += 1;
    this.count += 1;
  }

  /** The state changes by something else than an event. */
  cut() {
    this.isCut = true;
  }

  #begin(state) {
    this.isCut = false;
    this.parts.push({ before: state.copy(), events: [], steps: 0 });
    while (this.parts.length > PARTS_KEPT || (this.#size > EVENTS_KEPT && this.parts.length > 1)) {
      const { events, steps } = this.parts.shift();
      this.#size -= events.length;
      this.first += steps;
    }
  }

  /** The state right after a step was decided; null if it is not kept. */
  at(step) {
    let left = step - this.first;
    if (left < 0 || step >= this.count) return null;
    const part = this.parts.find(({ steps }) => left < steps || ((left -= steps), false));
    const state = part.before.copy();
    for (const event of part.events) {
      state.apply(event);
      if (event.name === "sched.output" && left-- === 0) break;
    }
    return state;
  }
}

/** All engines' steps in the order in which they were told, and which of them is shown. */
class Timeline {
  constructor() {
    this.steps = []; // [view, number of the step in its history]
    this.place = null; // into `steps`; null: the present
  }

  /** A step of this view's engine has just been decided. */
  add(view) {
    this.steps.push([view, view.history.count - 1]);
    if (this.steps.length % STEPS_PER_PART) return;
    const shown = this.steps[this.place];
    this.steps = this.steps.filter(([each, step]) => step >= each.history.first);
    if (shown) this.place = Math.max(0, this.steps.indexOf(shown));
  }

  /** Show a place, or with null the present. */
  show(place, views) {
    this.place = place === null || !this.steps.length ? null : Math.max(0, Math.min(place, this.steps.length - 1));
    for (const view of views) {
      const last = this.place === null ? null : this.steps.slice(0, this.place + 1).findLast(([each]) => each === view);
      view.past = this.place === null ? null : (last && view.history.at(last[1])) || new EngineState(view.state.labels);
      view.drawSoon();
    }
    this.tell();
  }

  /** Show the step that this view's history has under this number. */
  showStep(view, step, views) {
    const place = this.steps.findIndex(([each, number]) => each === view && number === step);
    if (place < 0) byId("moment").textContent = `step ${step} is no longer kept here`;
    else this.show(place, views);
  }

  tell() {
    const [slider, isLive, last] = [byId("scrub"), this.place === null, Math.max(0, this.steps.length - 1)];
    slider.max = last;
    slider.value = isLive ? last : this.place;
    slider.disabled = byId("step-back").disabled = byId("step-on").disabled = byId("pause").disabled = !this.steps.length;
    byId("pause").textContent = isLive ? "Pause" : "Go on";
    const [view] = this.steps[isLive ? last : this.place] ?? [];
    const text = !view ? "" : isLive ? "live" : `step ${view.past?.step}${view.isAlone ? "" : ` of engine ${view.number}`}, ${last - this.place} before the newest`;
    byId("moment").textContent = text;
    slider.setAttribute("aria-valuetext", text);
  }
}
