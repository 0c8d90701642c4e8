// Part 3 of 5: the settings and the requests, as the learner edits them.

const byId = (id) => document.getElementById(id);

/** An element with attributes and children; text is never read as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  element.append(...children);
  return element;
}

const SLIDERS = {
  // setting: [its words, what a slider reaches; the number beside it goes further]
  max_num_batched_tokens: ["token budget of a step", 128],
  num_gpu_blocks_override: ["KV-cache blocks, block 0 included", 65],
  block_size: ["tokens per block", 32],
  max_num_seqs: ["seats: requests that run at once", 16],
  long_prefill_token_threshold: ["most tokens of one prompt in a step (0 = off)", 64],
};
const flag = (name) => `--${name.replaceAll("_", "-")}`;
const ARRIVAL_REACH = 60; // steps that the slider of an arrival reaches
const HUES = 7;

class Editor {
  #rows = [];

  /** `onChange()` is called after every possible change. */
  constructor(onChange) {
    this.scenario = null;
    this.onChange = onChange;
    for (const name of Object.keys(SLIDERS)) byId("sliders").append(this.#slider(name));
    for (const policy of DATA.policies) byId("scheduling_policy").append(make("option", { value: policy }, policy));
    byId("scheduling_policy").addEventListener("change", (event) => this.#set("scheduling_policy", event.target.value));
    for (const name of DATA.switches) {
      byId(name).title = flag(name);
      byId(name).addEventListener("change", (event) => this.#set(name, event.target.checked));
    }
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
    byId("add").addEventListener("click", () => this.#add());
  }

  show(scenario) {
    this.scenario = scenario;
    for (const name of Object.keys(SLIDERS)) this.#showNumber(name, scenario.settings[name]);
    for (const name of DATA.switches) byId(name).checked = scenario.settings[name];
    byId("scheduling_policy").value = scenario.settings.scheduling_policy;
    this.#showRequests();
    this.#showFlags();
  }

  /** A request's arrival, dragged in the picture. */
  setArrival(place, step) {
    const [least, most] = DATA.request_fields.arrival;
    this.scenario.requests[place].arrival = Math.min(most, Math.max(least, step));
    this.#showRow(place);
    this.onChange();
  }

  #changed() {
    this.#showFlags();
    this.onChange();
  }

  // Settings

  #slider(name) {
    const [words, reach] = SLIDERS[name];
    const [least, most] = DATA.fields[name];
    const range = make("input", { type: "range", id: `${name}-range`, min: least, max: reach, "aria-label": words });
    const number = make("input", { type: "number", id: name, min: least, max: most, required: true });
    range.addEventListener("input", () => {
      number.value = range.value;
      this.#setNumber(name, number);
    });
    number.addEventListener("input", () => {
      range.value = number.value;
      this.#setNumber(name, number);
    });
    return make("div", { class: "slider" }, make("label", { for: name, title: flag(name) }, words), range, number);
  }

  #setNumber(name, number) {
    number.setAttribute("aria-invalid", String(!number.checkValidity()));
    if (number.checkValidity()) this.#set(name, number.valueAsNumber);
  }

  #set(name, value) {
    this.scenario.settings[name] = value;
    this.#changed();
  }

  #showNumber(name, value) {
    for (const id of [name, `${name}-range`]) byId(id).value = value;
    byId(name).setAttribute("aria-invalid", "false");
  }

  #showFlags() {
    const { settings } = this.scenario;
    const words = [...Object.keys(SLIDERS), "scheduling_policy"].map((name) => `  ${flag(name)} ${settings[name]}`);
    const off = DATA.switches.filter((name) => !settings[name]).map((name) => `  ${flag(`no_${name}`)}`);
    byId("flags").textContent = ["stages serve gpt2-tiny", ...words, ...off].join(" \\\n");
  }

  // Requests

  #add() {
    const { requests } = this.scenario;
    if (requests.length >= DATA.max_requests) return;
    const names = requests.map(({ id }) => id);
    const letters = [..."abcdefghijklmnopqrstuvwxyz"];
    const id = letters.find((letter) => !names.includes(letter)) ?? Array.from({ length: 99 }, (_, i) => `r${i}`).find((name) => !names.includes(name));
    const arrival = Math.max(1, ...requests.map((request) => request.arrival)) + 1;
    requests.push(complete({ settings: {}, requests: [{ id, arrival: Math.min(arrival, DATA.request_fields.arrival[1]) }] }).requests[0]);
    this.#showRequests();
    this.#changed();
    this.#rows.at(-1).name.focus();
  }

  #remove(place) {
    this.scenario.requests.splice(place, 1);
    this.#showRequests();
    this.#changed();
    (this.#rows[Math.min(place, this.#rows.length - 1)]?.remove ?? byId("add")).focus();
  }

  #showRequests() {
    const { requests } = this.scenario;
    this.#rows = requests.map((_, place) => this.#row(place));
    byId("requests").tBodies[0].replaceChildren(...this.#rows.map(({ row }) => row));
    requests.forEach((_, place) => this.#showRow(place));
    this.#rows.forEach(({ remove }) => (remove.disabled = requests.length === 1));
    byId("add").disabled = requests.length >= DATA.max_requests;
  }

  #row(place) {
    const { id } = this.scenario.requests[place];
    const number = (field) => {
      const [least, most] = DATA.request_fields[field];
      const input = make("input", { type: "number", min: least, max: most, required: true, "aria-label": `${field} of ${id}` });
      input.addEventListener("input", () => this.#setField(place, field, input));
      return input;
    };
    const parts = { name: make("input", { type: "text", maxlength: 12, "aria-label": `name of request ${place + 1}` }) };
    for (const field of Object.keys(DATA.request_fields)) parts[field] = number(field);
    parts.range = make("input", { type: "range", min: 1, max: ARRIVAL_REACH, "aria-label": `arrival of ${id} on the time line` });
    parts.range.addEventListener("input", () => this.setArrival(place, parts.range.valueAsNumber));
    parts.prefix = make("select", { "aria-label": `shared prefix of ${id}` }, make("option", { value: "" }, "none"), ...[...DATA.prefixes].map((name) => make("option", { value: name }, name)));
    parts.prefix.addEventListener("change", () => this.#setPrefix(place, parts.prefix.value));
    parts.name.addEventListener("input", () => this.#rename(place, parts.name));
    parts.remove = make("button", { type: "button", "aria-label": `remove ${id}` }, "✕");
    parts.remove.addEventListener("click", () => this.#remove(place));
    const hue = `--hue: var(--hue-${place % HUES})`;
    const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
    const cells = [parts.prompt, parts.output, parts.prefix, parts.shared, parts.priority, parts.remove].map((input) => make("td", {}, input));
    parts.row = make("tr", {}, make("th", { scope: "row" }, swatch, parts.name), make("td", {}, make("div", { class: "arrives" }, parts.range, parts.arrival)), ...cells);
    parts.row.style.cssText = hue;
    return parts;
  }

  /** The values of a row; what is being typed into is left alone. */
  #showRow(place) {
    const [request, parts] = [this.scenario.requests[place], this.#rows[place]];
    const values = { ...request, name: request.id, range: request.arrival };
    for (const [part, input] of Object.entries(parts)) {
      if (part in values && input !== document.activeElement) input.value = values[part];
    }
    parts.shared.disabled = !request.prefix;
    parts.shared.max = request.prompt;
  }

  #setField(place, field, input) {
    const request = this.scenario.requests[place];
    input.setAttribute("aria-invalid", String(!input.checkValidity()));
    if (!input.checkValidity()) return;
    request[field] = input.valueAsNumber;
    request.shared = Math.min(request.shared, request.prompt);
    this.#showRow(place);
    this.#changed();
  }

  #setPrefix(place, prefix) {
    const request = this.scenario.requests[place];
    request.prefix = prefix;
    if (!prefix) request.shared = 0;
    else if (!request.shared) request.shared = Math.max(1, Math.floor(request.prompt / 2));
    this.#showRow(place);
    this.#changed();
  }

  #rename(place, input) {
    const taken = this.scenario.requests.some(({ id }, other) => other !== place && id === input.value);
    const problem = taken ? "another request has this name" : nameProblem(input.value);
    input.setCustomValidity(problem);
    input.setAttribute("aria-invalid", String(Boolean(problem)));
    input.title = problem;
    if (problem) return;
    this.scenario.requests[place].id = input.value;
    this.#changed();
  }
}
