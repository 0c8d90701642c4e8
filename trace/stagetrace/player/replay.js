"use strict";
// Part 1 of 8: from events to a state. No picture here: a Recording knows its events, and what the system looked like after each.
// What an event means is written beside each handler below; the words are those of stagetrace.vocabulary.

const PHASES = ["CLI entry", "serve", "API server", "AsyncLLM", "EngineCore", "request", "into the engine", "execution", "response"];
const SNAPSHOTS = 64; // states that are kept, evenly spread: going back replays at most one such stretch

/** The state before the first event. `requests` has one entry per request, by its place in the recording's table, `engines` one per process:
 * most processes are no engine, and theirs stays empty. */
function emptyState(numRequests, numProcesses) {
  return {
    at: -1, // place of the last event that is in this state
    phase: 0,
    requests: Array.from({ length: numRequests }, emptyRequest),
    engines: Array.from({ length: numProcesses }, emptyEngine),
    inFlight: [], // places of messages that were sent and not received yet
    lastOf: [], // process -> place of its last event
    doing: [], // process -> places of the spans that it is in
  };
}

/** One engine: its scheduler and its KV cache. */
function emptyEngine() {
  return {
    step: 0, inStep: false, dead: "", deadAt: -1, // place of the event that says so
    waiting: [], running: [], // places of requests, in the scheduler's order
    policy: "fcfs", usable: 0, blockSize: 0, arrivals: 0,
    blocks: [], // block id -> {holders: [request, ...], cached}, never changed but replaced; undefined: never named yet
    held: 0, // blocks with a holder
    freeRecorded: -1, // what the scheduler itself reported last; -1: nothing yet
    budget: 0, maxSeqs: 0, decided: false, heldBack: null, preempted: [],
  };
}

function emptyRequest() {
  return {
    status: "unknown", // api, waiting, prefill, decode, preempted, done
    engine: -1, // process of the engine that has it, or had it last
    prompt: 0, total: 0, computed: 0, output: 0, // tokens
    chunk: 0, drafts: 0, accepted: 0, // of this step
    given: 0, // tokens that it got since it was admitted last
    cachedTokens: 0, preemptions: 0, arrival: 0, priority: 0,
    blocks: [], reason: "", by: "", answered: false,
    askedFor: "", text: "", tokenIds: [], // prompt and output: only with --trace-prompts
  };
}

/** A state of its own, several times as fast as structuredClone: what is never changed, only replaced, is shared. */
function copyOf(state) {
  const request = (r) => ({ ...r, blocks: r.blocks.slice(), tokenIds: r.tokenIds.slice() });
  const engine = (e) => ({ ...e, waiting: e.waiting.slice(), running: e.running.slice(), preempted: e.preempted.slice(), blocks: e.blocks.slice() });
  const { requests, engines, inFlight, lastOf, doing } = state;
  return {
    ...state, requests: requests.map(request), engines: engines.map(engine),
    inFlight: inFlight.slice(), lastOf: lastOf.slice(), doing: doing.map((spans) => spans.slice()),
  };
}

// Small helpers of the handlers

function remove(list, req) {
  const at = list.indexOf(req);
  if (at >= 0) list.splice(at, 1);
}

/** Enter a queue where the policy says. Arrival breaks every tie, so a preempted request returns to its old place. */
function enqueue(state, engine, queue, req) {
  if (queue.includes(req)) return;
  const key = (one) => [engine.policy === "priority" ? state.requests[one].priority : 0, state.requests[one].arrival];
  const goesBefore = ([priority, arrival], [p, a]) => priority < p || (priority === p && arrival < a);
  const behind = queue.findIndex((other) => goesBefore(key(req), key(other)));
  queue.splice(behind < 0 ? queue.length : behind, 0, req);
}

const FREE = { holders: [], cached: false };

function hold(engine, id, req) {
  const { holders, cached } = engine.blocks[id] ?? FREE;
  if (holders.includes(req)) return;
  if (holders.length === 0) engine.held += 1;
  engine.blocks[id] = { holders: [...holders, req], cached };
}

function release(engine, id, req) {
  const { holders, cached } = engine.blocks[id] ?? FREE;
  if (!holders.includes(req)) return;
  if (holders.length === 1) engine.held -= 1;
  engine.blocks[id] = { holders: holders.filter((one) => one !== req), cached };
}

function setCached(engine, id, cached) {
  engine.blocks[id] = { ...(engine.blocks[id] ?? FREE), cached };
}

/** Between two steps: what was given is computed, and no request has anything yet. */
function completeStep(state, engine) {
  for (const req of engine.running) {
    const r = state.requests[req];
    r.computed = Math.min(r.computed + r.chunk + r.accepted, r.total);
    r.chunk = r.drafts = r.accepted = 0;
  }
}

// One handler per event that changes the state: (state, the engine of its process, args, request, its place, event, the recording)

function onStep(state, engine, args, r, req, event) {
  completeStep(state, engine);
  engine.inStep = event.ph === "B";
  if (!engine.inStep) return;
  engine.step = event.step;
  engine.heldBack = null;
  engine.decided = false;
  engine.preempted = [];
}

function onAdmit(state, engine, args, r, req) {
  remove(engine.waiting, req);
  enqueue(state, engine, engine.running, req);
  r.status = "prefill";
  r.given = 0;
  r.blocks = args.new_blocks.slice(); // the prefix cache's first
}

function onScheduled(state, engine, args, r) {
  if (r.status === "prefill" && args.missing === 1 && r.given > 0) r.status = "decode"; // it lacks only the token it received last
  r.computed = args.num_computed;
  r.total = args.num_computed + args.missing;
  r.chunk = args.num_tokens;
  r.given += args.num_tokens;
}

/** The scheduler says in which order they wait: whatever policy a user's own class has, this is what it did. */
function onHeldBack(state, engine, args, r, req, event, { placeOfId }) {
  engine.heldBack = args;
  const order = [...args.held, args.first, ...args.behind].map((id) => placeOfId.get(id)).filter((one) => engine.waiting.includes(one));
  if (order.length === engine.waiting.length) engine.waiting = order;
}

function onPreempt(state, engine, args, r, req) {
  remove(engine.running, req);
  enqueue(state, engine, engine.waiting, req);
  r.status = "preempted";
  r.preemptions += 1;
  if (!args.swapped) r.computed = 0; // it must be computed again, unless it was copied to CPU memory
  r.chunk = r.drafts = r.accepted = 0;
  engine.preempted.push(req);
}

function onFinished(state, engine, args, r, req) {
  remove(engine.running, req);
  remove(engine.waiting, req);
  r.status = "done";
  r.reason = args.reason;
  r.by = args.by;
}

function onFreed(state, engine, args, r, req) {
  for (const id of args.blocks) {
    release(engine, id, req);
    remove(r.blocks, id);
  }
}

function onDetokenized(state, engine, args, r) {
  if (typeof args.text === "string") r.text += args.text;
}

/** An engine hears of the request, for the first time or because the one that had it died. */
function onQueued(state, engine, args, r, req, event) {
  const before = state.engines[r.engine];
  if (before && before !== engine) for (const queue of [before.waiting, before.running]) remove(queue, req);
  Object.assign(r, { status: "waiting", engine: event.process, prompt: args.num_prompt_tokens, total: args.num_prompt_tokens });
  Object.assign(r, { computed: 0, chunk: 0, drafts: 0, accepted: 0, output: 0, blocks: [], tokenIds: [] });
  r.priority = args.params?.priority ?? 0;
  r.arrival = engine.arrivals++;
  enqueue(state, engine, engine.waiting, req);
}

/** Of several engines the one of this number died, the newest process of that name: nobody runs there now, and its blocks are gone. */
function onLost(state, engine, args, r, req, event, { processes }) {
  const lost = processes.findLastIndex(({ name }, at) => name === `EngineCore_DP${args.engine}` && state.lastOf[at] !== undefined);
  if (lost >= 0) state.engines[lost] = { ...emptyEngine(), step: state.engines[lost].step };
  if (lost >= 0) die(state.engines[lost], args, event);
}

function onAllDead(state, engine, args, r, req, event) {
  for (const each of state.engines) die(each, args, event);
}

/** What is seen first is why it died. */
function die(engine, { message }, { at }) {
  if (engine.dead) return;
  engine.dead = message || "the engine process is gone";
  engine.deadAt = at;
}

const HANDLERS = {
  "scheduler.created": (state, engine, args) => {
    engine.usable = args.num_blocks - 1; // block 0 is padding and never given to a request
    engine.budget = args.max_num_batched_tokens;
    engine.maxSeqs = args.max_num_seqs;
    engine.policy = args.scheduler_config?.scheduling_policy ?? "fcfs";
    engine.blockSize = args.cache_config?.block_size ?? 0;
  },
  "http.request": (state, engine, args, r) => { if (r) r.status = "api"; },
  "request.registered": (state, engine, args, r) => { r.status = "api"; },
  "zmq.request_sent": (state, engine, args, r, req, event) => state.inFlight.push(event.at),
  "zmq.outputs_sent": (state, engine, args, r, req, event) => state.inFlight.push(event.at),
  "zmq.request_received": (state, engine, args, r, req, event) => remove(state.inFlight, event.cause),
  "zmq.outputs_received": (state, engine, args, r, req, event) => remove(state.inFlight, event.cause),
  "sched.queued": onQueued,
  "engine.step": onStep,
  "sched.admit": onAdmit,
  "sched.resume": onAdmit,
  "sched.prefix_hit": (state, engine, args, r, req) => {
    r.cachedTokens = args.num_tokens;
    for (const id of args.blocks) hold(engine, id, req);
  },
  "sched.scheduled": onScheduled,
  "spec.scheduled": (state, engine, args, r) => { r.drafts = args.num_tokens; },
  "spec.verified": (state, engine, args, r) => { r.accepted = args.accepted; },
  "sched.preempt": onPreempt,
  "sched.held_back": onHeldBack,
  "sched.output": (state, engine, args) => {
    engine.decided = true;
    engine.budget = args.budget;
    engine.freeRecorded = args.free_blocks;
  },
  "sched.token": (state, engine, args, r) => {
    r.total = r.prompt + args.num_output_tokens;
    r.output = args.num_output_tokens;
    r.tokenIds.push(...(args.token_ids ?? []));
  },
  "sched.finished": onFinished,
  "kv.allocated": (state, engine, args, r, req) => {
    for (const id of args.blocks) hold(engine, id, req);
    r.blocks.push(...args.blocks);
  },
  "kv.freed": onFreed,
  "kv.cached": (state, engine, args) => args.blocks.forEach((id) => setCached(engine, id, true)),
  "kv.evicted": (state, engine, args) => setCached(engine, args.block, false),
  "kv.reset": (state, engine, args) => { if (args.done) engine.blocks.forEach((_, id) => setCached(engine, id, false)); },
  "request.tokenized": (state, engine, args, r) => { r.askedFor = args.prompt ?? ""; },
  "request.detokenized": onDetokenized,
  "request.finished": (state, engine, args, r) => { r.answered = true; },
  "request.aborted": (state, engine, args, r) => { r.answered = true; r.reason ||= args.reason; },
  "dp.engine_lost": onLost,
  "engine.dead": onAllDead,
  "engine.failed": (state, engine, args, r, req, event) => die(engine, { message: args.message || "the engine failed" }, event),
};

/** Apply the next event of a recording to the state. */
function apply(state, event, recording) {
  state.at = event.at;
  state.phase = event.phase || state.phase;
  state.lastOf[event.process] = event.at;
  const doing = (state.doing[event.process] ??= []);
  if (event.ph === "B") doing.push(event.at);
  else if (event.ph === "E") remove(doing, doing.findLast((at) => recording.events[at].name === event.name && recording.events[at].step === event.step));
  const r = event.req >= 0 ? state.requests[event.req] : null;
  HANDLERS[event.name]?.(state, state.engines[event.process], event.args, r, event.req, event, recording);
}

/** One run: its tables, its events, and the state after each of them. */
class Recording {
  constructor(data) {
    this.title = data.title;
    this.start = data.start ?? ""; // where to open, as a link says it
    this.root = data.root ?? ""; // the project's folder, if the page is on the same machine
    this.places = new Map(Object.entries(data.places)); // name of an event and its file -> [folder, function, "walk" if the walk stops there]
    this.processes = data.processes.map(([pid, name]) =>
      ({ pid, name, isEngine: name.startsWith("EngineCore"), isWorker: name.startsWith("Worker_"), hasScheduler: false }));
    this.meanings = new Map(data.names.map(([name, phase, stage, meaning, vllm]) => [name, { phase, stage, meaning, vllm }]));
    this.requests = data.requests.map(([id, label]) => ({ id, label }));
    this.nameWidth = this.requests.reduce((most, { label }) => Math.max(most, Math.min(8, label.length)), 2); // letters
    this.placeOfId = new Map(data.requests.map(([id], at) => [id, at]));
    this.events = data.events.map((row, at) => this.#event(data, row, at));
    this.effects = new Map(); // place of an event -> places of those that it caused
    this.steps = []; // {step, process, start, decided, end}: places of events; decided = where the decision of the step is complete
    this.spans = this.requests.map(() => []); // request -> [{start, status}], for the timeline
    this.chances = new Map(); // request -> of each token of its answer [[text, probability] of the chosen one, of the likely ones ...]
    this.tokensAt = this.requests.map(() => []); // request -> of each token of its answer the place of the event with which it came
    this.received = new Set(); // places of messages whose receipt was recorded
    this.numBlocks = []; // of each engine: ids below this one are named in the recording
    for (const event of this.events) {
      if (event.name === "scheduler.created" || event.name === "engine.step") this.processes[event.process].hasScheduler = true;
    }
    const engines = this.processes.map((process, number) => ({ ...process, number })).filter((one) => one.hasScheduler);
    this.engines = engines.sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : a.number - b.number)).map((one) => one.number); // processes
    this.#readThrough();
    this.firstScheduled = Math.max(0, this.events.findIndex(({ name }) => name === "sched.scheduled"));
    this.compared = this.steps.filter((one) => one.process === this.engines[0]); // two runs are compared by the steps of their first engines
  }

  #event(data, [us, process, kind, source, ph, values, step, req, cause], at) {
    const [name, ...keys] = data.kinds[kind];
    const args = Object.fromEntries(keys.map((key, k) => [key, values[k]]));
    const { phase } = this.meanings.get(name);
    return { at, us, process, name, phase, source: data.sources[source], ph: "iBE"[ph], args, step, req, cause };
  }

  /** Once over everything: snapshots, and where steps, spans and messages begin. */
  #readThrough() {
    this.every = Math.max(256, Math.ceil(this.events.length / SNAPSHOTS));
    this.snapshots = [emptyState(this.requests.length, this.processes.length)];
    const state = emptyState(this.requests.length, this.processes.length);
    for (const event of this.events) {
      apply(state, event, this);
      this.#note(event, state);
      if ((event.at + 1) % this.every === 0) this.snapshots.push(copyOf(state));
    }
    this.numBlocks = state.engines.map(({ blocks }, process) => Math.max(blocks.length, this.numBlocks[process] ?? 1)); // by process
    this.current = state;
  }

  #note(event, state) {
    if (event.cause >= 0) {
      if (!this.effects.has(event.cause)) this.effects.set(event.cause, []);
      this.effects.get(event.cause).push(event.at);
      this.received.add(event.cause);
    }
    const { at, name, ph } = event;
    const { process } = event;
    if (name === "scheduler.created") this.numBlocks[process] = event.args.num_blocks;
    if (name === "engine.step" && ph === "B") this.steps.push({ step: event.step, process, start: at, decided: at, end: at });
    const step = name === "engine.step" || name === "sched.output" ? this.steps.findLast((one) => one.process === process) : null;
    if (step && name === "sched.output") step.decided = at;
    if (step && name === "engine.step") step.end = at;
    if (event.req < 0) return;
    if (name === "sched.token") this.#noteTokens(event);
    if (name === "answer.logprobs") this.#noteChances(event);
    const spans = this.spans[event.req];
    const status = state.requests[event.req].status;
    if (spans.at(-1)?.status !== status) spans.push({ start: event.at, status });
  }

  /** A token that is computed again, because its engine died, came with the first. */
  #noteTokens({ at, req, args }) {
    const places = this.tokensAt[req];
    while (places.length < args.num_output_tokens) places.push(at);
  }

  /** They are told with the text of an answer, or with its end: later than the step that chose the tokens. */
  #noteChances({ req, args }) {
    const known = this.chances.get(req) ?? [];
    args.chances.forEach((one, k) => { known[args.first + k] = one; });
    this.chances.set(req, known);
  }

  /** The state after the event at this place. It is this recording's own: read it, and ask again later. */
  stateAt(at) {
    const snapshot = Math.floor((at + 1) / this.every);
    const behind = this.current.at > at;
    if (behind || at - this.current.at > this.every) this.current = copyOf(this.snapshots[snapshot]);
    while (this.current.at < at) apply(this.current, this.events[this.current.at + 1], this);
    return this.current;
  }

  label(req) {
    return this.requests[req]?.label ?? "";
  }

  /** What the vocabulary says about an event. */
  meaning(event) {
    const span = { B: "Begins. ", E: "Ends. ", i: "" }[event.ph];
    return span + (this.meanings.get(event.name).meaning || "Not in the vocabulary of this version.");
  }

  oneLine(event) {
    return [event.name, { B: "begins", E: "ends", i: "" }[event.ph], this.label(event.req)].filter(Boolean).join(" ");
  }

  /** The short name of a request that an argument names by its id. */
  labelOfId(id) {
    return this.placeOfId.has(id) ? this.label(this.placeOfId.get(id)) : String(id);
  }
}

/**
 * What was decided in a step and what came of it, one line each, with the arrivals and departures since the step before. Two runs are
 * compared by it (`stagetrace diff` compares the same); times, pids and the random parts of ids are not in it.
 */
function decisions(recording, k) {
  const lines = [], steps = recording.compared;
  for (let at = k ? steps[k - 1].end + 1 : 0; at <= steps[k].end; at++) {
    const event = recording.events[at];
    const line = event.process === steps[k].process ? decision(recording, event) : "";
    if (line) lines.push(line);
  }
  return lines;
}

const DECISIONS = {
  "sched.queued": (args, who) => `${who} joins the queue with ${args.num_prompt_tokens} tokens`,
  "sched.admit": (args, who) => `${who} is admitted, blocks ${args.new_blocks.join(" ")}`,
  "sched.resume": (args, who) => `${who} comes back, blocks ${args.new_blocks.join(" ")}`,
  "sched.prefix_hit": (args, who) => `${who} finds ${args.num_tokens} tokens in the prefix cache`,
  "sched.scheduled": (args, who) => `${who} gets ${args.num_tokens} of ${args.missing} missing tokens`,
  "sched.preempt": (args, who, label) => `${who} is preempted for ${label(args.needed_by)}`,
  "sched.held_back": (args, who, label) => {
    const behind = args.behind.map(label).join(" ") || "none";
    return `${args.first ? label(args.first) : "a request"} is held back: ${args.rule || "it is not prepared"}, behind it ${behind}`;
  },
  "sched.output": (args) => `${args.total_tokens} tokens in all, ${args.free_blocks} blocks free`,
  "sched.token": (args, who) => `${who} receives ${args.num_tokens} of ${args.sampled} sampled ${(args.token_ids ?? []).join(" ")}`.trim(),
  "sched.finished": (args, who) => `${who} ends: ${args.reason} (${args.by}), ${args.freed_blocks} blocks free again`,
  "spec.scheduled": (args, who) => `${who} has ${args.num_tokens} drafts verified`,
  "spec.verified": (args, who) => `${args.accepted} of ${args.drafted} drafts of ${who} stand`,
  "spec.proposed": (args, who) => `${args.num_tokens} drafts are proposed for ${who}`,
  "kv.allocated": (args, who) => `${who} takes blocks ${args.blocks.join(" ")}`,
  "kv.freed": (args, who) => `${who} gives back blocks ${args.blocks.join(" ")}`,
  "kv.cached": (args) => `blocks ${args.blocks.join(" ")} can be found from now on`,
  "kv.evicted": (args) => `block ${args.block} is forgotten`,
};

function decision(recording, { name, args, req }) {
  const label = (id) => recording.labelOfId(id);
  return DECISIONS[name]?.(args, recording.label(req), label) ?? "";
}

/** What only one of two runs has in its step of this number, [lines of the first, of the second]; null if the step is the same. */
function stepDifference(runs, step) {
  const places = runs.map((run) => run.compared.findIndex((one) => one.step === step));
  const lines = runs.map((run, i) => (places[i] < 0 ? ["there is no such step"] : decisions(run, places[i])));
  if (lines[0].join("\n") === lines[1].join("\n")) return null;
  const only = [0, 1].map((i) => lines[i].filter((line) => !lines[1 - i].includes(line)));
  return only[0].length + only[1].length ? only : [["the same, in a different order"], ["the same, in a different order"]];
}
