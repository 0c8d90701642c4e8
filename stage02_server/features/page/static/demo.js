// Part 8 of 9: many requests at once, and what to look for meanwhile.

const SIGHTS = {
  batching: "several requests share a step",
  chunking: "a prompt is computed in several steps",
  "prefix hit": "the beginning of a prompt is in the cache already",
  preemption: "a request loses its blocks to another",
};
const seen = new Map(); // sight -> [view, step in its history, words]
const ROOM_FACTOR = 1.3; // how much more than fits

/** Note the first time that each sight is there, as the events tell. */
function lookFor({ name, step, req, args }, view) {
  if (byId("seen").hidden) return;
  const who = view.state.label(req);
  const sight = {
    "sched.output": () => view.state.steps.at(-1).given.size > 1 && ["batching", `${view.state.steps.at(-1).given.size} requests`],
    "sched.scheduled": () => args.num_tokens < args.missing && ["chunking", `${who}: ${args.num_tokens} of ${args.missing} tokens`],
    "sched.prefix_hit": () => args.num_tokens > 0 && ["prefix hit", `${who}: ${args.num_tokens} tokens`],
    "sched.preempt": () => ["preemption", `${who} for ${view.state.label(args.needed_by)}`],
  }[name]?.();
  if (!sight || seen.has(sight[0])) return;
  const place = view.history.count - (name === "sched.output"); // the others come before the end of their step
  seen.set(sight[0], [view, place, `${sight[1]}, step ${step ?? view.state.step + 1}`]);
  showSeen();
}

function showSeen() {
  const items = Object.entries(SIGHTS).map(([sight, meaning]) => {
    const item = make("li", { "data-sight": sight, "data-seen": seen.has(sight) }, seen.has(sight) ? "✓" : "…", make("b", {}, sight));
    if (!seen.has(sight)) return item.append(make("span", { class: "caption" }, meaning)), item;
    const [view, step, words] = seen.get(sight);
    const show = make("button", { type: "button", "aria-label": `show ${sight}` }, "show");
    show.addEventListener("click", () => timeline.showStep(view, step, views));
    item.append(make("span", {}, words), show);
    return item;
  });
  byId("seen").replaceChildren(...items);
}

/** Eight requests for a cache of `room` tokens (per engine): {shared, requests: [{prompt, output}], lacks: what will not be seen}, in tokens. Their
 * prompts begin alike. Answers are as long as it takes to fill the cache, if that is possible. */
function planOf({ room, budget, maxLength, blockSize }) {
  const longest = Math.min(maxLength, room);
  const shared = Math.min(3 * blockSize, Math.floor(longest / 4));
  const requests = [0, 1, 2, 3, 4, 5, 6, 7].map((place) => ({
    prompt: Math.min(shared + 8 + 12 * place, longest - 8),
    output: 24 * (1 + Math.floor(place / 2)),
  }));
  const long = Math.ceil(1.5 * budget);
  if (long <= longest - 24) requests[1].prompt = Math.max(requests[1].prompt, long);
  const needed = () => requests.reduce((sum, { prompt, output }) => sum + Math.min(prompt + output, longest) - shared, shared);
  for (let more = 0; more < 30 && needed() < ROOM_FACTOR * room; more++) for (const request of requests) request.output += 8;
  for (let place = 0; place < 8; place += 2) { // two share one max_tokens
    const [one, other] = requests.slice(place, place + 2);
    one.output = other.output = Math.max(1, Math.min(one.output, longest - Math.max(one.prompt, other.prompt)));
  }
  const lacks = [];
  if (Math.max(...requests.map(({ prompt }) => prompt)) <= budget) lacks.push("chunking");
  if (needed() <= room) lacks.push("preemption");
  return { shared, requests, lacks };
}

/** Ask for all of them; several prompts in each request of HTTP, since a browser opens six connections to a server and the live view has one.
 * `groups`: [{prompts, max_tokens, names: of the prompts}]; with `first`, the first group's text has begun before the others are sent. */
async function askMany(groups, body, first = false) {
  if (running) return;
  running = new AbortController();
  showBusy(true);
  for (const id of ["problem", "summary", "demo-problem"]) byId(id).textContent = "";
  byId("output").replaceChildren();
  ended = null;
  seen.clear();
  byId("seen").hidden = false;
  showSeen();
  timeline.show(null, views);
  const signal = running.signal;
  const began = performance.now();
  const count = groups.flatMap(({ names }) => names).length;
  let [tokens, left] = [0, count];
  try {
    const askGroup = async ({ prompts, max_tokens, names }, hasBegun = () => {}) => {
      const places = names.map((name) => addTurn(name, ""));
      const how = { method: "POST", signal, body: JSON.stringify({ ...body, prompt: prompts, max_tokens }), headers: { "Content-Type": "application/json" } };
      for await (const data of serverSentEvents(await ask("v1/completions", how))) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        tokens += chunk.usage?.completion_tokens ?? 0;
        const choice = chunk.choices[0];
        if (!choice) continue;
        hasBegun();
        places[choice.index].append(choice.text);
      }
      left -= names.length;
      byId("summary").textContent = `${left} of ${count} are on their way`;
    };
    byId("summary").textContent = `${count} are on their way`;
    const [head, ...rest] = groups;
    let mayGo = Promise.resolve();
    const all = [];
    if (first) mayGo = new Promise((go) => all.push(askGroup(head, go).finally(go)));
    else all.push(askGroup(head));
    await mayGo;
    await Promise.all([...all, ...rest.map((group) => askGroup(group))]);
    byId("summary").textContent = `${count} answers, ${tokens} tokens · after ${time(performance.now() - began)}`;
  } catch (error) {
    const isStopped = error.name === "AbortError";
    byId("summary").textContent = isStopped ? "stopped; the engine has freed their blocks" : "";
    if (!isStopped) byId("problem").textContent = error.message;
    running.abort(); // of several, none goes on alone
  } finally {
    running = null;
    showBusy(false);
  }
}

const COMMON = { stream: true, stream_options: { include_usage: true }, ignore_eos: true };

/** The prompt of the form, and seven longer ones; answers up to a quarter, half, three quarters and all of max_tokens. */
function sendEight() {
  const fields = form.elements;
  const most = Number(fields.max_tokens.value) || 64;
  const texts = [...Array(8).keys()].map((place) => Array(place + 1).fill(fields.prompt.value).join("\n"));
  const pairs = [0, 1, 2, 3].map((place) => {
    const max_tokens = Math.max(1, Math.round(((place + 1) * most) / 4));
    return { prompts: [texts[place], texts[7 - place]], max_tokens, names: [place, 7 - place].map((at) => `the prompt, ${at + 1} times; up to ${max_tokens} tokens`) };
  });
  const temperature = fields.temperature.value === "" ? {} : { temperature: Number(fields.temperature.value) };
  return askMany(pairs, { ...COMMON, ...temperature, model: fields.model.value });
}

/** The command of a server whose cache and budget are so small that all of it is seen. */
const smallServer = (model) => `python -m stage02_server serve ${model} --num-gpu-blocks-override 48 --max-num-batched-tokens 64 --max-num-seqs 8`;

async function demonstrate() {
  const model = form.elements.model.value;
  const { num_blocks, block_size, max_num_batched_tokens } = live.settings;
  if (!live.known) return (byId("demo-problem").textContent = "The demonstration needs the live view: tick \"watch\".");
  try {
    const headers = { "Content-Type": "application/json" };
    const text = "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer. ".repeat(8);
    const { tokens, max_model_len } = await (await ask("tokenize", { method: "POST", headers, body: JSON.stringify({ model, prompt: text }) })).json();
    const plan = planOf({ room: num_blocks * block_size, budget: max_num_batched_tokens, maxLength: max_model_len, blockSize: block_size });
    const ids = (count, place) => Array.from({ length: count }, (_, at) => tokens[(at < plan.shared ? at : at + 5 * place + 1) % tokens.length]);
    const pairs = [0, 2, 4, 6].map((place) => {
      const two = plan.requests.slice(place, place + 2);
      const all = views.flatMap(() => two); // each engine gets its share
      const names = all.map(({ prompt, output }) => `a prompt of ${prompt} tokens, ${plan.shared} of them shared; ${output} more`);
      return { prompts: all.map(({ prompt }, at) => ids(prompt, 2 * place + at)), max_tokens: two[0].output, names };
    });
    const asked = askMany(pairs, { ...COMMON, temperature: 0, model }, true);
    if (plan.lacks.length) {
      byId("demo-problem").replaceChildren(
        `This server's cache of ${num_blocks * block_size} tokens and budget of ${max_num_batched_tokens} a step are too large for ${plan.lacks.join(" and ")}. One that shows everything: `,
        make("code", {}, smallServer(model)),
      );
    }
    await asked;
  } catch (error) {
    byId("problem").textContent = error.message;
  }
}

byId("send-eight").addEventListener("click", sendEight);
byId("demonstrate").addEventListener("click", demonstrate);
