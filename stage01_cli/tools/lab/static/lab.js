// Part 5 of 5: the page: a scenario from the link, a run for every change, play.

const DELAY = 40; // ms: of several changes in this time only the last is run
const LINK_DELAY = 300; // ms: browsers allow only some hundred changes of the address in half a minute
const PLAY_MS = 350;

const picture = new Picture((place, step) => editor.setArrival(place, step));
const editor = new Editor(changed);
const simulator = DATA.mode === "static" ? new BrowserSimulator(say) : new ServerSimulator();
const hasEditor = DATA.mode === "static" || Boolean(DATA.editor && simulator.key);
let wanted = 0; // number of the newest change: an answer to an older one is dropped
let timer = 0;
let linkTimer = 0;
let playing = 0;

function say(text) {
  byId("status").textContent = text;
}

function complain(text) {
  byId("problem").textContent = text ?? "";
}

/** The learner's own scheduler, if it is chosen: its code, or "" for the class that the server was started with; null: the reference. */
function own() {
  if (document.querySelector("[name=whose]:checked").value === "reference") return null;
  return hasEditor ? byId("code").value || "\n" : "";
}

function changed() {
  clearTimeout(linkTimer);
  linkTimer = setTimeout(showLink, LINK_DELAY);
  markScenario();
  runSoon();
}

function showLink() {
  history.replaceState(null, "", writeLink(editor.scenario));
}

function runSoon() {
  document.body.dataset.busy = "true";
  clearTimeout(timer);
  timer = setTimeout(run, DELAY);
}

async function run() {
  const mine = ++wanted;
  const chosen = own();
  let answer;
  let reference = null;
  try {
    const both = [simulator.run(editor.scenario, null), ...(chosen === null ? [] : [simulator.run(editor.scenario, chosen)])];
    [answer, reference = null] = (await Promise.all(both)).reverse();
  } catch (error) {
    answer = { problem: DATA.mode === "static" ? notServed(error) : `The server of this page does not answer: ${error.message}` };
  }
  if (mine !== wanted) return;
  delete document.body.dataset.busy;
  complain(answer.problem);
  showPrinted(answer.printed);
  if (answer.cells) {
    picture.draw(answer, reference?.cells ? reference : null);
    if (picture.movedPlace !== undefined) byId("grid").querySelector(`.arrival[data-place="${picture.movedPlace}"]`)?.focus();
    picture.movedPlace = undefined;
  }
  document.body.dataset.run = String(mine);
}

function notServed(error) {
  if (location.protocol === "file:") return "A browser runs no Python from a file: serve this folder, for instance with python -m http.server, and open it there.";
  return `Python could not be started in this browser: ${error.message}`;
}

function showPrinted(text) {
  byId("printed").hidden = !text;
  byId("printed-text").textContent = text ?? "";
}

// Scenarios and links

function load(scenario) {
  clearTimeout(linkTimer);
  editor.show(scenario);
  markScenario();
  runSoon();
}

function loadLink() {
  complain("");
  if (location.hash.length <= 1) return load(complete(structuredClone(DATA.scenarios[0])));
  try {
    load(readLink(decodeURIComponent(location.hash)));
    say("");
  } catch (error) {
    say(`This link cannot be read: ${error instanceof LinkError ? error.message : "it is damaged"}. The first scenario is shown instead.`);
    load(complete(structuredClone(DATA.scenarios[0])));
  }
}

function showScenarios() {
  const buttons = DATA.scenarios.map((scenario) => {
    const button = make("button", { type: "button", "aria-pressed": "false" }, scenario.name);
    button.addEventListener("click", () => {
      say("");
      const whole = complete(structuredClone(scenario));
      history.pushState(null, "", writeLink(whole));
      picture.keep(null);
      byId("pin").setAttribute("aria-pressed", "false");
      load(whole);
    });
    return button;
  });
  byId("scenarios").replaceChildren(...buttons);
}

/** Which named scenario this is, or came from; what to look at stays until another is chosen. */
function markScenario() {
  const link = writeLink(editor.scenario);
  DATA.scenarios.forEach((scenario, place) => {
    const is = writeLink(complete(scenario)) === link;
    byId("scenarios").children[place].setAttribute("aria-pressed", String(is));
    if (is) byId("look").textContent = scenario.look;
  });
}

// Buttons

function showWhose() {
  const radio = document.querySelector("[name=whose][value=own]");
  if (hasEditor) {
    byId("own-name").textContent = "yours, written here";
    const handed = new URLSearchParams(location.search).has("own") && localStorage.getItem("stages-own-scheduler"); // by the page of the exercises
    byId("code").value = handed || DATA.starter;
    if (handed) radio.checked = true;
  } else if (DATA.own) byId("own-name").replaceChildren("yours: ", make("code", {}, DATA.own));
  else if (DATA.editor) byId("own-name").textContent = "yours: open the link that was printed, with its key";
  if (DATA.mode === "server") byId("where").textContent = "on this machine, in a process of its own";
  radio.disabled = !hasEditor && !DATA.own;
  const show = () => {
    byId("own-text").hidden = !hasEditor || own() === null;
    byId("again").hidden = hasEditor || own() === null;
  };
  for (const each of document.querySelectorAll("[name=whose]")) {
    each.addEventListener("change", () => {
      show();
      runSoon();
    });
  }
  if (DATA.own) radio.checked = true;
  show();
  byId("again").addEventListener("click", runSoon);
  byId("run-code").addEventListener("click", runSoon);
  byId("code").addEventListener("keydown", editCode);
}

/** In the text box Tab indents, after Escape it leaves. */
function editCode(event) {
  const box = event.target;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) return runSoon();
  if (event.key === "Escape") return (box.dataset.leave = "true");
  if (event.key === "Tab" && !event.shiftKey && !box.dataset.leave) {
    event.preventDefault();
    box.setRangeText("    ", box.selectionStart, box.selectionEnd, "end");
  }
  delete box.dataset.leave;
}

function showButtons() {
  byId("copy").addEventListener("click", async () => {
    showLink();
    try {
      await navigator.clipboard.writeText(location.href);
      say("The link is copied.");
    } catch {
      say("The link stands in the address bar: copy it from there.");
    }
  });
  byId("pin").addEventListener("click", () => {
    const keeps = byId("pin").getAttribute("aria-pressed") === "false";
    byId("pin").setAttribute("aria-pressed", String(keeps));
    picture.keep(keeps ? picture.numbers() : null);
  });
  byId("back").addEventListener("click", () => picture.select(0, picture.step - 1));
  byId("forward").addEventListener("click", () => picture.select(0, picture.step + 1));
  byId("play").addEventListener("click", () => (playing ? stop() : play()));
}

function play() {
  if (picture.step >= picture.lastStep) picture.select(0, 1);
  byId("play").textContent = "Stop";
  playing = setInterval(() => (picture.step >= picture.lastStep ? stop() : picture.select(0, picture.step + 1)), PLAY_MS);
}

function stop() {
  clearInterval(playing);
  playing = 0;
  byId("play").textContent = "Play";
}

showScenarios();
showWhose();
showButtons();
addEventListener("hashchange", loadLink);
loadLink();
