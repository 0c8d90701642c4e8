// The page "Your own text": what each step showed is kept, so that one can go back; Python is asked for the next one only.

const DATA = JSON.parse(document.getElementById("data").textContent);
const STEP_SECONDS = 60; // on a slow machine a step with a long prompt takes some
const OTHERS = ["Once more unto the breach", "O Romeo, Romeo", "My lord,", "To be, or not to be, that", "What light", "All the world", "The king"];
const byId = (id) => document.getElementById(id);
const letter = (name) => String.fromCharCode(65 + (Number(name.slice(1)) % 26));
const python = new BrowserPython(DATA.start, (text) => (byId("status").textContent = text));
let story = []; // what there was to see after each step; the first is the beginning
let shown = 0; // which of them is seen
let busy = false;
let playing = false;

async function ask(question) {
  const answer = await python.ask(question, STEP_SECONDS);
  byId("problem").textContent = answer?.problem ?? (answer ? "" : "The step took too long, and was ended with its engine: begin anew.");
  return answer && !answer.problem ? answer : null;
}

const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

const number = (id) => {
  const field = byId(id);
  return Math.min(Number(field.max), Math.max(Number(field.min), Math.trunc(Number(field.value)) || Number(field.min)));
};

/** An empty engine with the settings of the page. */
async function begin() {
  playing = false;
  const settings = { num_blocks: number("blocks"), block_size: 16, budget: number("budget") };
  const state = await ask({ do: "begin", ...settings });
  if (!state) return;
  story = [{ step: 0, given: {}, tables: {}, attention: [], preempted: [], found: {}, blocks: settings.num_blocks, ...state }];
  show(0);
}

async function send(prompts) {
  const state = await ask({ do: "send", prompts, max_tokens: number("tokens") });
  if (!state) return;
  story[story.length - 1] = { ...story.at(-1), ...state };
  show(story.length - 1);
  await play();
}

/** One step further: the next one that is kept, or a new one of the engine. */
async function next() {
  if (shown < story.length - 1) return show(shown + 1);
  if (busy || story.at(-1)?.idle !== false) return;
  busy = true;
  const step = await ask({ do: "step", watched: byId("watched").value, layer: Number(byId("layer").value), head: Number(byId("head").value) });
  busy = false;
  if (step) {
    story.push({ blocks: story[0].blocks, ...step });
    show(story.length - 1);
  } else playing = false;
}

async function play() {
  if (playing) return;
  playing = true;
  while (playing && (shown < story.length - 1 || story.at(-1).idle === false)) {
    const before = performance.now();
    await next();
    await new Promise((resolve) => setTimeout(resolve, Math.max(0, 150 - (performance.now() - before))));
  }
  playing = false;
  show(shown);
}

function element(kind, text, className = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  made.className = className;
  return made;
}

function show(place) {
  shown = place;
  const now = story[place];
  byId("number").textContent = now.step;
  Object.assign(byId("at"), { max: story.length - 1, value: place });
  byId("back").disabled = place === 0;
  byId("next").disabled = place === story.length - 1 && now.idle !== false;
  byId("play").textContent = playing ? "Pause" : "Play";
  byId("play").setAttribute("aria-pressed", String(playing));
  const given = Object.values(now.given);
  byId("batch").textContent = given.length ? `${count(given.reduce((a, b) => a + b), "token")} of ${count(given.length, "request")} in this step, ${count(now.free.length, "block")} free` : "";
  byId("requests").replaceChildren(...now.requests.map((each) => row(each, now)));
  showBlocks(now);
  showHead(now);
  document.body.dataset.step = now.step;
  document.body.dataset.idle = String(now.idle !== false);
}

function row(each, now) {
  const item = document.createElement("li");
  const given = now.given[each.name];
  const what = now.preempted.includes(each.name) ? "preempted" : each.state;
  const found = now.found[each.name] ? `, ${now.found[each.name]} found` : "";
  const text = element("span", "", "text");
  text.append(element("span", each.prompt.join("")), element("span", each.text, "output"));
  item.append(element("b", letter(each.name)), element("span", given ? `${what}: +${given}${found}` : what, "caption"), text);
  return item;
}

function showBlocks(now) {
  const owners = new Map();
  for (const [name, table] of Object.entries(now.tables)) {
    const ended = now.requests.find((each) => each.name === name)?.state.startsWith("ended");
    if (!ended) table.forEach((block) => owners.set(block, [...(owners.get(block) ?? []), name]));
  }
  const cached = new Set(now.cached);
  const items = Array.from({ length: now.blocks - 1 }, (_, i) => {
    const names = owners.get(i + 1) ?? [];
    const item = element("li", (names.map(letter).join("") || "") + (cached.has(i + 1) ? "·" : ""), names.length ? "used" : "");
    if (names.some((name) => now.given[name])) item.classList.add("now");
    item.title = `block ${i + 1}: ${names.length ? names.map(letter).join(", ") : "free"}${cached.has(i + 1) ? ", findable by its hash" : ""}`;
    return item;
  });
  byId("pool-blocks").replaceChildren(...items);
}

function showHead(now) {
  const select = byId("watched"), before = select.value;
  select.replaceChildren(...now.requests.map((each) => new Option(letter(each.name), each.name)));
  if (now.requests.some((each) => each.name === before)) select.value = before;
  const highest = Math.max(...now.attention.map(([, weight]) => weight), 1e-9);
  const parts = now.attention.flatMap(([text, weight]) => {
    const meter = document.createElement("meter");
    Object.assign(meter, { max: highest, value: weight, title: `${(100 * weight).toFixed(1)} %` });
    meter.setAttribute("aria-label", `share of ${text.trim() || "a blank"}`);
    return [meter, element("span", text), element("sub", weight >= 0.05 ? ` ${Math.round(100 * weight)}` : "")];
  });
  byId("attention").replaceChildren(...(parts.length ? parts : ["This request was not computed in this step."]));
  const likely = now.requests.find((each) => each.name === select.value)?.likely ?? [];
  byId("likely").tBodies[0].replaceChildren(...likely.map(([text, chance]) => {
    const line = document.createElement("tr");
    line.append(element("td", JSON.stringify(text)), element("td", `${(100 * chance).toFixed(1)} %`));
    return line;
  }));
}

for (const [id, length] of [["layer", DATA.layers], ["head", DATA.heads]]) byId(id).replaceChildren(...Array.from({ length }, (_, i) => new Option(i, i)));
byId("send").onclick = () => send([byId("prompt").value]);
byId("send-8").onclick = () => send([byId("prompt").value, ...OTHERS]);
byId("again").onclick = begin;
byId("back").onclick = () => { playing = false; show(Math.max(0, shown - 1)); };
byId("next").onclick = () => { playing = false; next(); };
byId("play").onclick = () => { if (playing) playing = false; else play(); };
byId("at").oninput = () => { playing = false; show(Number(byId("at").value)); };
byId("watched").onchange = () => show(shown);
python.ready.then(begin, (error) => {
  byId("problem").textContent = location.protocol === "file:" ? "A browser runs no Python from a file: serve this folder, for instance with python -m http.server, and open it there." : `Python could not be started in this browser: ${error.message}`;
});
