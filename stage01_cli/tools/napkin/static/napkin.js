// The page: controls for what is given, and the napkin drawn anew with each change.

const given = JSON.parse(document.getElementById("data").textContent);
const OWN_CHIP = "your own";
const get = id => document.getElementById(id);

/** An element with attributes and children; a child that is text stays text. */
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function options(id, pairs, chosen) {
  get(id).append(...pairs.map(([value, label]) => make("option", { value, ...(value === chosen ? { selected: "" } : {}) }, label)));
  get(id).addEventListener("change", draw);
}

/** A slider of a thousand steps from least to most, by ratios, and the exact number beside it. */
function slider(place, id, label, [least, most, value], whole) {
  const position = number => Math.round(1000 * Math.log(number / least) / Math.log(most / least));
  const range = make("input", { id: `${id}-range`, type: "range", min: 0, max: 1000, "aria-label": label });
  const number = make("input", { id, type: "number", min: least, max: most, step: whole ? 1 : "any", value });
  const show = () => {
    range.value = position(Number(number.value));
    range.setAttribute("aria-valuetext", number.value);
  };
  range.addEventListener("input", () => {
    const exact = least * (most / least) ** (range.value / 1000);
    number.value = whole ? Math.round(exact) : Number(exact.toPrecision(2));
    range.setAttribute("aria-valuetext", number.value);
    draw();
  });
  number.addEventListener("input", () => { if (valid(number)) show(); draw(); });
  get(place).append(make("div", { class: "slider" }, make("label", { for: id }, label), range, number));
  show();
}

function chipNumber(id, label) {
  const number = make("input", { id, type: "number", min: 0.001, max: 1e6, step: "any" });
  number.addEventListener("input", () => { get("chip").value = OWN_CHIP; draw(); });
  get("chip-numbers").append(make("div", { class: "slider plain" }, make("label", { for: id }, label), number));
}

function valid(number) {
  const good = number.value !== "" && number.validity.valid;
  number.toggleAttribute("aria-invalid", false);
  if (!good) number.setAttribute("aria-invalid", "true");
  return good;
}

const CHIP_UNITS = { memory: 1e9, bandwidth: 1e9, arithmetic: 1e12 };

function showChip() {
  const chip = given.chips[get("chip").value];
  if (chip) for (const [name, unit] of Object.entries(CHIP_UNITS)) get(`chip-${name}`).value = Number((chip[name] / unit).toPrecision(6));
}

/** [model, chip, load] as the controls say. */
function read() {
  const value = id => Number(get(id).value);
  const own = Object.fromEntries(Object.entries(CHIP_UNITS).map(([name, unit]) => [name, value(`chip-${name}`) * unit]));
  return [
    given.models[get("model").value], given.chips[get("chip").value] ?? { name: OWN_CHIP, ...own },
    {
      prompt: value("prompt"), answer: value("answer"), tpot: value("tpot-ms") / 1000, weight_bytes: value("weight_bytes"),
      kv_bytes: value("kv_bytes"), price: value("price"), reach: value("reach") / 100,
    },
  ];
}

const shown = (number, digits = 3) => Number.isFinite(number)
  ? Number(number.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 6 }) : "–";
const bytes = number => number < 1e6 ? `${shown(number / 1e3)} kB` : number < 1e9 ? `${shown(number / 1e6)} MB` : `${shown(number / 1e9)} GB`;
const milliseconds = seconds => `${shown(seconds * 1e3)} ms`;
const count = number => number.toLocaleString("en-US");

function list(id, pairs) {
  get(id).replaceChildren(...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function draw() {
  const wrong = [...document.querySelectorAll("input[type=number]")].filter(number => !valid(number));
  let found, problem = "";
  const [model, chip, load] = read();
  if (wrong.length) {
    const [first] = wrong;
    problem = `${first.labels[0].textContent} must be ${first.step === "1" ? "a whole number " : ""}from ${count(Number(first.min))} to ${count(Number(first.max))}.`;
  } else {
    try {
      found = napkin(model, chip, load);
    } catch (error) {
      problem = `${error.message[0].toUpperCase()}${error.message.slice(1)}: lower prompt or answer.`;
    }
  }
  if (get("problem").textContent !== problem) get("problem").textContent = problem; // said again only when it changes
  document.querySelector(".right").hidden = !found;
  if (found) show(model, chip, load, found);
}

function show(model, chip, load, found) {
  list("result", [
    ["users", count(found.users)], ["TPOT", found.users ? milliseconds(found.tpot) : "–"],
    ["tokens a second", shown(found.tokens_per_second)], ["a million tokens cost", shown(found.cost)],
  ]);
  get("wall").textContent = `${count(found.users)} users. The wall is ${found.wall}: ${given.walls[found.wall][found.users ? 0 : 1]}.`;
  const walls = ["memory", "bandwidth", "arithmetic"].map(name => [name, found[`${name}_wall`]]);
  const widest = Math.log(2 + Math.max(...walls.map(([, users]) => users)));
  get("walls").replaceChildren(...walls.map(([name, users]) => {
    const bar = make("div", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${100 * Math.log(1 + users) / widest}%`;
    return make("li", name === found.wall ? { class: "lowest" } : {}, make("span", {}, name), make("div", { class: "well" }, bar), make("b", {}, count(users)));
  }));
  list("parts", [
    ["weights", bytes(found.weight_bytes)], ["KV cache of a token", bytes(found.kv_bytes_per_token)],
    ["KV cache of a user", bytes(found.kv_bytes_per_user)], ["prefill of a prompt", milliseconds(found.prefill)],
    ["decode step of one user", milliseconds(found.step_of_one)],
    ["arithmetic binds", Number.isFinite(found.crossing) ? `from ${count(Math.ceil(found.crossing))} users on` : "at no batch"],
  ]);
  get("chart").replaceChildren(chart(model, chip, load, found));
}

/** Milliseconds for a further token against users, both by ratios; as wide as there is room, so that its words keep their size. */
function chart(model, chip, load, found) {
  const [width, height, left, bottom, top, right] = [Math.max(260, get("chart").clientWidth), 300, 56, 42, 12, 18];
  const share = prefillSeconds(model, chip, load) / load.answer;
  const reading = users => readWeightsSeconds(model, chip, load) + users * (readContextSeconds(model, chip, load) + share);
  const computing = users => users * (computeTokenSeconds(model, chip, load) + share);
  const most = Math.max(10, 3 * Math.max(found.memory_wall, Math.min(found.bandwidth_wall, found.arithmetic_wall)));
  const times = [reading(1), reading(most), computing(1), computing(most), load.tpot].map(seconds => seconds * 1e3);
  const low = Math.min(...times) / 1.5, high = Math.max(...times) * 1.5;
  const x = users => left + (width - left - right) * Math.log(users) / Math.log(most);
  const y = ms => top + (height - top - bottom) * Math.log(high / ms) / Math.log(high / low);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", `Time for a further token against users: with ${count(Math.max(1, found.users))} users, reading takes ${milliseconds(reading(Math.max(1, found.users)))} and computing ${milliseconds(computing(Math.max(1, found.users)))}; ${milliseconds(load.tpot)} are promised.`);
  for (let power = 0; 10 ** power <= most; power++) {
    svg.append(make("line", { class: "grid", x1: x(10 ** power), x2: x(10 ** power), y1: top, y2: height - bottom }));
    svg.append(make("text", { x: x(10 ** power), y: height - bottom + 16, "text-anchor": "middle" }, count(10 ** power)));
  }
  const decades = Math.log10(high / low), stride = Math.ceil(decades / 7);
  for (let power = Math.ceil(Math.log10(low)); 10 ** power <= high; power += stride) {
    svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: y(10 ** power), y2: y(10 ** power) }));
    svg.append(make("text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, shown(10 ** power)));
  }
  svg.append(make("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, "users"));
  svg.append(make("text", { x: 14, y: height / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${height / 2})` }, "ms"));
  const curve = (name, seconds) => {
    const points = Array.from({ length: 81 }, (_, i) => most ** (i / 80)).map(users => `${x(users).toFixed(1)} ${y(seconds(users) * 1e3).toFixed(1)}`);
    svg.append(make("path", { class: name, d: `M${points.join("L")}` }));
  };
  curve("bandwidth", reading);
  curve("arithmetic", computing);
  curve("promise", () => load.tpot);
  if (found.memory_wall >= 1) svg.append(make("path", { class: "memory", d: `M${x(found.memory_wall)} ${top}V${height - bottom}` }));
  if (found.users) svg.append(make("circle", { cx: x(found.users), cy: y(found.tpot * 1e3), r: 6 }));
  return svg;
}

options("model", Object.keys(given.models).map(name => [name, name]), given.model);
options("weight_bytes", [["4", "4 bytes"], ["2", "2 bytes"], ["1", "1 byte"], ["0.5", "half a byte"]], "2");
options("kv_bytes", [["4", "4 bytes"], ["2", "2 bytes"], ["1", "1 byte"]], "2");
slider("load", "prompt", "prompt, tokens", given.numbers.prompt, true);
slider("load", "answer", "answer, tokens", given.numbers.answer, true);
slider("load", "tpot-ms", "promised TPOT, ms", given.numbers["tpot-ms"], false);
chipNumber("chip-memory", "memory, GB");
chipNumber("chip-bandwidth", "bandwidth, GB a second");
chipNumber("chip-arithmetic", "arithmetic, TFLOP a second");
slider("economy", "reach", "share of that which is reached, %", given.numbers.reach, true);
slider("economy", "price", "price of an hour", given.numbers.price, false);
options("chip", [...Object.keys(given.chips), OWN_CHIP].map(name => [name, name]), given.chip);
get("chip").addEventListener("change", () => { showChip(); draw(); });
get("given").addEventListener("submit", event => event.preventDefault());
window.addEventListener("resize", draw);
showChip();
draw();
document.body.dataset.ready = "";
