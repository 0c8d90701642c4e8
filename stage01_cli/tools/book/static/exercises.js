// The page of the exercises: what was written and what was passed stays in this browser's storage.

const DATA = JSON.parse(document.getElementById("data").textContent);
const LIMIT = 60; // seconds, as for `stages course check`
const byId = (id) => document.getElementById(id);
const python = new BrowserPython(DATA.start, say, onTold);
let chosen = null;
let busy = false;
let judged = null; // the exercise of which Python has a file loaded: another begins with a new Python
let seen = 0; // tests that have passed in the check that runs

function say(text) {
  byId("status").textContent = text;
}

function notServed(error) {
  if (location.protocol === "file:") return "A browser runs no Python from a file: serve this folder, for instance with python -m http.server, and open it there.";
  return `Python could not be started in this browser: ${error.message}`;
}

// What is kept

function progress() {
  try {
    return JSON.parse(localStorage.getItem("stages-progress")) ?? {};
  } catch {
    return {};
  }
}

const now = () => `${new Date().toISOString().slice(0, 19)}+00:00`;

/** Change the row of an exercise: the same table as work/progress.json. */
function update(name, change) {
  const rows = progress();
  rows[name] = { started: "", checks: 0, passed: "", served: "", hints: 0, ...rows[name] };
  change(rows[name]);
  localStorage.setItem("stages-progress", JSON.stringify(rows));
  showList();
  return rows[name];
}

const place = (name) => `stages-code-${name}`;

function save(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// What is shown

function showList() {
  const rows = progress();
  const items = DATA.exercises.map((each) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `${each.number}. ${each.title}`;
    button.setAttribute("aria-pressed", String(each === chosen));
    if (rows[each.name]?.passed) button.className = "passed";
    if (each.why_not) button.className += " outside";
    button.addEventListener("click", () => (location.hash = each.name));
    const item = document.createElement("li");
    item.append(button);
    return item;
  });
  byId("list").replaceChildren(...items);
  const passed = DATA.exercises.filter(({ name }) => rows[name]?.passed).length;
  byId("points").textContent = `passed: ${passed} of ${DATA.exercises.length}`;
}

function choose() {
  const name = location.hash.slice(1);
  chosen = DATA.exercises.find((each) => each.name === name) ?? DATA.exercises.find((each) => !each.why_not);
  showList();
  byId("title").textContent = `Exercise ${chosen.number}: ${chosen.title}`;
  byId("goal").textContent = chosen.goal;
  byId("text").href = chosen.text;
  byId("elsewhere").hidden = !chosen.why_not;
  byId("write").hidden = Boolean(chosen.why_not);
  byId("why-not").textContent = chosen.why_not ?? "";
  byId("commands").textContent = `make venv\n.venv/bin/stages course start ${chosen.number}`;
  showContract(null);
  if (chosen.why_not) return;
  byId("code").value = localStorage.getItem(place(chosen.name)) ?? chosen.starter;
  byId("lab").hidden = ![4, 5].includes(chosen.number);
  showVerdict("", "");
  showHints(progress()[chosen.name]?.hints ?? 0);
  showNumbers(null);
}

function showContract(broken) {
  const items = Object.entries(chosen.contract ?? {}).map(([key, sentence]) => {
    const item = document.createElement("li");
    item.textContent = sentence;
    if (key === broken) item.className = "broken";
    return item;
  });
  byId("contract").replaceChildren(...items);
}

function showHints(count) {
  const items = chosen.hints.slice(0, count).map((text) => Object.assign(document.createElement("li"), { textContent: text }));
  byId("hints").replaceChildren(...items);
  byId("hint").disabled = count >= chosen.hints.length;
  byId("hint").textContent = count ? `Hint (${count} of ${chosen.hints.length} shown)` : "Hint";
}

function showVerdict(text, kind) {
  byId("verdict").textContent = text;
  byId("verdict").className = kind;
}

/** The numbers of the lines; the line of the verdict is marked, and scrolled to. */
function showNumbers(marked) {
  const box = byId("code");
  const lines = box.value.split("\n").length;
  const parts = Array.from({ length: lines }, (_, i) => {
    if (i + 1 !== marked) return `${i + 1}\n`;
    return Object.assign(document.createElement("b"), { textContent: String(marked) });
  });
  byId("numbers").replaceChildren(...parts);
  if (marked) box.scrollTop = Math.max(0, (marked - 8) * 18);
  byId("numbers").scrollTop = box.scrollTop;
}

// What is done

function onTold(text) {
  const line = JSON.parse(text);
  if (line.outcome === "passed") seen += 1;
  if (line.collected) seen = 0;
  if (busy && judged === chosen) showVerdict(`The judge is at work: ${seen} test${seen === 1 ? "" : "s"} passed so far.`, "");
}

async function check() {
  if (busy) return;
  const exercise = chosen;
  const code = byId("code").value;
  if (judged && judged !== exercise) python.restart();
  judged = exercise;
  busy = true;
  seen = 0;
  byId("check").disabled = true;
  byId("end").hidden = false;
  byId("problem").textContent = "";
  showVerdict("The judge is at work.", "");
  const began = performance.now();
  let answer;
  try {
    answer = await python.ask({ check: exercise.name, code }, LIMIT);
  } catch (error) {
    byId("problem").textContent = notServed(error);
    showVerdict("", "");
  }
  busy = false;
  byId("check").disabled = false;
  byId("end").hidden = true;
  if (answer === undefined) return;
  const seconds = ((performance.now() - began) / 1000).toFixed(1);
  answer ??= { outcome: "error", text: `no verdict after ${seconds} s, with ${seen} tests passed, so it was ended: a loop that never ends?`, line: null };
  if (answer.problem) answer = { outcome: "error", text: answer.problem, line: null };
  update(exercise.name, (row) => {
    row.checks += 1;
    row.started ||= now();
    row.passed = answer.outcome === "passed" ? row.passed || now() : "";
  });
  if (answer.spoiled) python.restart();
  if (exercise === chosen) show(answer, seconds);
  document.body.dataset.checked = String(Number(document.body.dataset.checked ?? 0) + 1);
}

function show(answer, seconds) {
  const passed = answer.outcome === "passed";
  const words = { passed: `passed (${answer.tests} tests, ${seconds} s)`, unwritten: "not yet written", rejected: "not yet right", error: "it does not work yet" };
  showVerdict(`${chosen.title}: ${words[answer.outcome] ?? answer.outcome}\n${answer.text}`.trim(), passed ? "passed" : "not");
  showContract(answer.sentence);
  showNumbers(answer.line);
}

function edit(event) {
  const box = event.target;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) return check();
  if (event.key === "Escape") return (box.dataset.leave = "true");
  if (event.key === "Tab" && !event.shiftKey && !box.dataset.leave) {
    event.preventDefault();
    box.setRangeText("    ", box.selectionStart, box.selectionEnd, "end");
    changed();
  }
  delete box.dataset.leave;
}

function changed() {
  localStorage.setItem(place(chosen.name), byId("code").value);
  update(chosen.name, (row) => (row.started ||= now()));
  showNumbers(null);
}

byId("check").addEventListener("click", check);
byId("end").addEventListener("click", () => python.restart());
byId("hint").addEventListener("click", () => showHints(update(chosen.name, (row) => (row.hints = Math.min(row.hints + 1, chosen.hints.length))).hints));
byId("save").addEventListener("click", () => save(`${chosen.name}.py`, byId("code").value));
byId("export").addEventListener("click", () => save("progress.json", `${JSON.stringify(progress(), null, 1)}\n`));
byId("again").addEventListener("click", () => {
  if (!confirm("Begin anew? What you have written is lost; Save the file keeps it.")) return;
  localStorage.removeItem(place(chosen.name));
  choose();
});
byId("lab").addEventListener("click", () => {
  localStorage.setItem("stages-own-scheduler", byId("code").value + (chosen.number === 4 ? DATA.pool_in_lab : ""));
  location.href = "index.html?own";
});
byId("code").addEventListener("input", changed);
byId("code").addEventListener("keydown", edit);
byId("code").addEventListener("scroll", () => (byId("numbers").scrollTop = byId("code").scrollTop));
addEventListener("hashchange", choose);
choose();
python.ready.catch((error) => (byId("problem").textContent = notServed(error)));
