// Part 4 of 4: the live view. It listens while the page is visible and the box is ticked; otherwise the engine sends nothing.

const live = new EngineState();
const RETRY_MS = 1000;
const MANY_BLOCKS = 256; // drawn at least; of a larger cache, as many as have been used
const MARGIN = 40; // left of the steps: the names of the requests
const LANES = 16; // requests in the picture of the steps
const MAX_ROWS = 40; // requests in the table
const MAX_BLOCKS = 4096; // cells in the picture of the KV cache
let listening = null; // the AbortController of the stream
let drawing = false;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const hue = (id) => colour(`--hue-${((live.labels.get(id) ?? 1) - 1) % 8}`);
const percent = (part, whole) => (whole ? Math.round((100 * part) / whole) : 0);

function say(text) {
  byId("live-status").textContent = text;
  byId("pictures").classList.toggle("past", text !== "watching"); // what it shows is not the present
}

async function listen() {
  const mine = (listening = new AbortController());
  while (!mine.signal.aborted) {
    try {
      const response = await ask("v1/engine/events", { signal: mine.signal });
      say("watching");
      for await (const data of serverSentEvents(response)) {
        live.apply(JSON.parse(data));
        drawSoon();
      }
      say("the stream ended; trying again");
    } catch (error) {
      if (mine.signal.aborted) break;
      if (error instanceof NotOffered) {
        byId("watch").checked = false; // asking again does not help; ticking the box does it
        listening = null;
        say(error.message);
        return;
      }
      say(`${error.message.replace(/\.$/, "")}; trying again`);
    }
    await new Promise((wake) => setTimeout(wake, RETRY_MS));
  }
}

/** Begin or end listening, as the box and the page's visibility say. */
function followOrNot() {
  const wanted = byId("watch").checked && document.visibilityState === "visible";
  if (wanted && !listening) listen();
  if (!wanted && listening) {
    listening.abort();
    listening = null;
    say("not watching");
  }
}

function drawSoon() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    draw();
  });
}

function draw() {
  const { settings, free, step } = live;
  const used = settings.num_blocks - free;
  const waiting = live.count("waiting") + live.count("preempted");
  const facts = { step, running: live.count("running"), waiting, used, free, blocks: settings.num_blocks };
  Object.assign(byId("live").dataset, facts);
  for (const [name, value] of Object.entries(facts)) {
    const place = byId(`fact-${name}`);
    if (place) place.textContent = value;
  }
  byId("held-back").textContent = live.heldBack;
  drawBudget();
  drawLanes();
  drawBlocks(used);
  drawTable();
}

/** A canvas of the size that it has on the page, cleared, in CSS pixels. */
function cleared(id, height) {
  const canvas = byId(id);
  const [ratio, width] = [window.devicePixelRatio || 1, canvas.parentElement.clientWidth];
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return { canvas, pen, width, height };
}

function drawBudget() {
  const { canvas, pen, width, height } = cleared("budget", 96);
  const last = live.steps.at(-1);
  const column = (width - MARGIN) / STEPS_KEPT;
  const scale = (height - 14) / Math.max(1, ...live.steps.map((done) => done.total));
  live.steps.forEach((done, place) => {
    let y = height;
    for (const [id, [tokens]] of done.given) {
      pen.fillStyle = hue(id);
      pen.fillRect(MARGIN + place * column, y - tokens * scale, Math.max(1, column - 1), tokens * scale);
      y -= tokens * scale;
    }
  });
  pen.fillStyle = colour("--soft");
  const most = Math.max(0, ...live.steps.map((done) => done.total));
  if (most) pen.fillText(most === 1 ? "1 token" : `${most} tokens`, 2, 7);
  const words = last ? `step ${last.step}: ${last.total} of ${last.budget} tokens, ${percent(last.total, last.budget)} %` : "no step yet";
  byId("budget-text").textContent = words;
  byId("budget-bar").value = last ? last.total / last.budget : 0;
  canvas.setAttribute("aria-label", `Tokens in each of the last ${live.steps.length} steps; ${words}`);
}

/** The requests that the last steps were about, the oldest first. */
function lanes() {
  const ids = new Set();
  for (const done of live.steps) for (const id of [...done.given.keys(), ...done.preempted]) ids.add(id);
  for (const [id, request] of live.requests) if (request.status !== "ended") ids.add(id);
  return [...ids];
}

function drawLanes() {
  const all = lanes();
  const ids = all.slice(-LANES);
  byId("lanes-text").textContent = all.length > LANES ? `the last ${LANES} of ${all.length}; ` : "";
  const row = 18;
  const { canvas, pen, width } = cleared("steps", Math.max(2, ids.length) * row);
  const column = (width - MARGIN) / STEPS_KEPT;
  ids.forEach((id, place) => {
    const y = place * row;
    pen.fillStyle = colour("--text");
    pen.fillText(live.label(id), 2, y + row / 2);
    live.steps.forEach((done, at) => {
      const [tokens, ofPrompt] = done.given.get(id) ?? [0, false];
      const x = MARGIN + at * column;
      pen.fillStyle = hue(id);
      if (tokens && ofPrompt) pen.fillRect(x, y + 2, Math.max(1, column - 1), row - 4);
      else if (tokens) pen.fillRect(x, y + 7, Math.max(1, column - 1), row - 14);
      pen.fillStyle = colour("--warn");
      if (done.preempted.has(id)) pen.fillText("×", x, y + row / 2);
    });
  });
  canvas.setAttribute("aria-label", `Which of ${ids.length} requests got tokens in which step; the table below says how far each has come`);
}

/** How many blocks to draw: those of a large cache that nobody has touched yet would only fill the page. */
function blocksToDraw() {
  let highest = MANY_BLOCKS;
  for (const touched of [live.holders.keys(), live.cached]) for (const block of touched) highest = Math.max(highest, block);
  return Math.min(live.settings.num_blocks, MAX_BLOCKS, Math.ceil(highest / MANY_BLOCKS) * MANY_BLOCKS);
}

function drawBlocks(used) {
  const total = blocksToDraw();
  const width = byId("blocks").parentElement.clientWidth;
  const size = total > 1024 ? 8 : total > 256 ? 12 : 18;
  const perRow = Math.max(1, Math.floor(width / size));
  const { canvas, pen } = cleared("blocks", Math.max(1, Math.ceil(total / perRow)) * size);
  const [line, text, soft] = [colour("--line"), colour("--text"), colour("--soft")];
  pen.textAlign = "center";
  pen.font = `${size > 12 ? 10 : 8}px system-ui, sans-serif`;
  for (let block = 1; block <= total; block++) {
    const [x, y] = [((block - 1) % perRow) * size, Math.floor((block - 1) / perRow) * size];
    drawBlock(pen, x, y, size, { who: [...(live.holders.get(block) ?? [])], cached: live.cached.has(block), line, text, soft });
  }
  const cut = total < live.settings.num_blocks ? ` (the first ${total} are shown)` : "";
  const words = `${used} of ${live.settings.num_blocks} blocks in use, ${percent(used, live.settings.num_blocks)} %${cut}`;
  byId("blocks-text").textContent = words;
  canvas.setAttribute("aria-label", words);
}

function drawBlock(pen, x, y, size, { who, cached, line, text, soft }) {
  const inner = size - 2;
  who.slice(0, 3).forEach((id, place, all) => {
    pen.fillStyle = hue(id);
    pen.fillRect(x + (place * inner) / all.length, y, inner / all.length, inner);
  });
  pen.strokeStyle = who.length ? text : line;
  pen.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
  if (cached) {
    pen.fillStyle = who.length ? text : soft;
    pen.fillRect(x + inner / 2 - 1.5, y + inner - 5, 3, 3);
  }
  if (who.length > 1 && size > 12) {
    pen.fillStyle = colour("--panel");
    pen.fillRect(x + 3, y + 1, inner - 6, 10);
    pen.fillStyle = text;
    pen.fillText(String(who.length), x + inner / 2, y + 6);
  }
}

function drawTable() {
  const order = { running: 0, preempted: 1, waiting: 2, ended: 3 };
  const held = new Map();
  for (const who of live.holders.values()) for (const id of who) held.set(id, (held.get(id) ?? 0) + 1);
  const all = [...live.requests].sort(([, a], [, b]) => order[a.status] - order[b.status]);
  const rows = all.slice(0, MAX_ROWS).map(([id, request]) => {
    const { status, computed, tokens, given, note } = request;
    const key = make("i", { class: "key" });
    key.style.background = hue(id);
    const cells = [status, `${computed} of ${tokens}`, given || "", held.get(id) ?? 0, note].map((value) => make("td", {}, String(value)));
    return make("tr", { "data-req": id, "data-status": status }, make("th", { scope: "row", title: id }, key, live.label(id)), ...cells);
  });
  byId("rows").replaceChildren(...rows);
  const left = all.length - rows.length + live.unlisted;
  byId("rows-left").textContent = left > 0 ? `and ${left} more` : all.length ? "" : "No request has come since this page began to watch.";
}

byId("watch").addEventListener("change", followOrNot);
document.addEventListener("visibilitychange", followOrNot);
window.addEventListener("resize", drawSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);
byId("api-key").addEventListener("change", () => {
  listening?.abort();
  listening = null;
  followOrNot();
});
draw();
followOrNot();
