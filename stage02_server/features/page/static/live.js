// Part 9 of 9: the live view. It listens while the page is visible and the box is ticked; otherwise the engines send nothing.

const RETRY_MS = 1000;
const live = new EngineState(); // of the first engine
const views = [new EngineView(live)]; // one of each engine, by their numbers
let listening = null; // the AbortController of the stream
const timeline = new Timeline();
let isTold = false; // has this stream said which engines there are?

function say(text) {
  byId("live-status").textContent = text;
  markPast();
}

/** What is shown is not the present unless this page watches, and the engine serves. */
function markPast() {
  const isWatching = byId("live-status").textContent === "watching";
  for (const view of views) view.setPast(!isWatching);
}

async function listen() {
  const mine = (listening = new AbortController());
  while (!mine.signal.aborted) {
    try {
      const response = await ask("v1/engine/events", { signal: mine.signal });
      isTold = false;
      say("watching");
      for await (const data of serverSentEvents(response)) apply(JSON.parse(data));
      say(`the stream ended${live.known && views.length === 1 ? ` after step ${live.step}` : ""}; trying again`);
    } catch (error) {
      if (mine.signal.aborted) break;
      if (error instanceof NotOffered || error instanceof KeyNeeded) {
        if (error instanceof NotOffered) byId("watch").checked = false; // asking again does not help; ticking the box does it
        listening = null;
        say(error.message);
        return;
      }
      say(`${error.message.replace(/\.$/, "")}; trying again`);
    }
    await new Promise((wake) => setTimeout(wake, RETRY_MS));
  }
}

/** Apply one trace event. Of several engines, dp.engines tells which there are; a single one says nothing of the kind. */
function apply(event) {
  if (event.name === "dp.engines") return showEngines(event.args.states);
  const number = Number(/_DP(\d+)$/.exec(event.proc)?.[1] ?? 0);
  if (!isTold && event.name === "sched.state") showEngines({ [number]: "ready" });
  const view = views.find((one) => one.number === number);
  if (!view) return;
  view.history.note(view.state, event);
  view.state.apply(event);
  if (event.name === "sched.output") {
    timeline.add(view);
    tellSoon();
  }
  lookFor(event, view);
  view.drawSoon();
}

const tellSoon = once(() => timeline.tell());

/** A view for each engine: number -> what it is doing. */
function showEngines(states) {
  isTold = true;
  const numbers = Object.keys(states).map(Number).sort((a, b) => a - b);
  while (views.length > numbers.length) views.pop().remove();
  while (views.length < numbers.length) views.push(views[0].copy(new EngineState(live.labels), `-${views.length}`));
  views.forEach((view, place) => view.shows(numbers[place], states[numbers[place]], numbers.length === 1));
  byId("live-title").textContent = numbers.length === 1 ? "The engine, live" : "The engines, live";
  markPast();
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

/** Another key may see what this one did not. */
function listenAnew() {
  listening?.abort();
  listening = null;
  followOrNot();
}

function drawSoon() {
  for (const view of views) view.drawSoon();
}

/** How far back the page goes, by so many steps; 0: to where the slider is. */
function go(by) {
  timeline.show(Number(byId("scrub").value) + by, views);
}

byId("scrub").addEventListener("input", () => go(0));
byId("step-back").addEventListener("click", () => go(-1));
byId("step-on").addEventListener("click", () => go(1));
byId("pause").addEventListener("click", () => (timeline.place === null ? go(0) : timeline.show(null, views)));
byId("watch").addEventListener("change", followOrNot);
document.addEventListener("visibilitychange", followOrNot);
window.addEventListener("resize", drawSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);
views[0].draw();
timeline.tell();
tryKey(); // and listen
