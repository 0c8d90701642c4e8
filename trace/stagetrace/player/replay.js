"use strict";
// Part 1 of 4: from events to a state. No picture here: a Recording knows its events, and what the system looked like after each.
// What an event means is written beside each handler below; the words are those of stagetrace.vocabulary.

const PHASES = ["CLI entry", "serve", "API server", "AsyncLLM", "EngineCore", "request", "into the engine", "execution", "response"];
const SNAPSHOTS = 64; // states that are kept, evenly spread: going back replays at most one such stretch

/** The state before the first event. `requests` has one entry per request, by its place in the recording's table. */
function emptyState(numRequests) {
  return {
    at: -1, // place of the last event that is in this state
    phase: 0, step: 0, inStep: false, engineDead: "",
    requests: Array.from({ length: numRequests }, emptyRequest),
    waiting: [], running: [], // places of requests, in the scheduler's order
    policy: "fcfs", usable: 0, blockSize: 0, arrivals: 0,
    blocks: [], // block id -> {holders: [request, ...], cached}; undefined: never named yet
    held: 0, // blocks with a holder
    freeRecorded: -1, // what the scheduler itself reported last; -1: nothing yet
    budget: 0, maxSeqs: 0, decided: false, heldBack: null, preempted: [],
    inFlight: [], // places of messages that were sent and not received yet
    lastOf: [], // process -> place of its last event
  };
}

function emptyRequest() {
  return {
    status: "unknown", // api, waiting, prefill, decode, preempted, done
    prompt: 0, total: 0, computed: 0, output: 0, // tokens
    chunk: 0, drafts: 0, accepted: 0, // of this step
    given: 0, // tokens that it got since it was admitted last
    cachedTokens: 0, preemptions: 0, arrival: 0, priority: 0,
    blocks: [], reason: "", by: "", answered: false,
    askedFor: "", text: "", tokenIds: [], // prompt and output: only with --trace-prompts
  };
}

// Small helpers of the handlers

function remove(list, req) {
  const at = list.indexOf(req);
  if (at >= 0) list.splice(at, 1);
}

/** Enter a queue where the policy says. Arrival breaks every tie, so a preempted request returns to its old place. */
function enqueue(state, queue, req) {
  if (queue.includes(req)) return;
  const key = (one) => [state.policy === "priority" ? state.requests[one].priority : 0, state.requests[one].arrival];
  const goesBefore = ([priority, arrival], [p, a]) => priority < p || (priority === p && arrival < a);
  const behind = queue.findIndex((other) => goesBefore(key(req), key(other)));
  queue.splice(behind < 0 ? queue.length : behind, 0, req);
}

function block(state, id) {
  return (state.blocks[id] ??= { holders: [], cached: false });
}

function hold(state, id, req) {
  const one = block(state, id);
  if (one.holders.includes(req)) return;
  if (one.holders.length === 0) state.held += 1;
  one.holders.push(req);
}

function release(state, id, req) {
  const one = block(state, id);
  if (!one.holders.includes(req)) return;
  remove(one.holders, req);
  if (one.holders.length === 0) state.held -= 1;
}

/** Between two steps: what was given is computed, and no request has anything yet. */
function completeStep(state) {
  for (const req of state.running) {
    const r = state.requests[req];
    r.computed = Math.min(r.computed + r.chunk + r.accepted, r.total);
    r.chunk = r.drafts = r.accepted = 0;
  }
}

// One handler per event that changes the state: (state, args, request, its place, event, places of request ids)

function onStep(state, args, r, req, event) {
  completeStep(state);
  state.inStep = event.ph === "B";
  if (!state.inStep) return;
  state.step = event.step;
  state.heldBack = null;
  state.decided = false;
  state.preempted = [];
}

function onAdmit(state, args, r, req) {
  remove(state.waiting, req);
  enqueue(state, state.running, req);
  r.status = "prefill";
  r.given = 0;
  r.blocks = args.new_blocks.slice(); // the prefix cache's first
}

function onScheduled(state, args, r) {
  if (r.status === "prefill" && args.missing === 1 && r.given > 0) r.status = "decode"; // it lacks only the token it received last
  r.computed = args.num_computed;
  r.total = args.num_computed + args.missing;
  r.chunk = args.num_tokens;
  r.given += args.num_tokens;
}

/** The scheduler says in which order they wait: whatever policy a user's own class has, this is what it did. */
function onHeldBack(state, args, r, req, event, placeOfId) {
  state.heldBack = args;
  const order = [...args.grammar, args.first, ...args.behind].map((id) => placeOfId.get(id)).filter((one) => state.waiting.includes(one));
  if (order.length === state.waiting.length) state.waiting = order;
}

function onPreempt(state, args, r, req) {
  remove(state.running, req);
  enqueue(state, state.waiting, req);
  r.status = "preempted";
  r.preemptions += 1;
  if (!args.swapped) r.computed = 0; // it must be computed again, unless it was copied to CPU memory
  r.chunk = r.drafts = r.accepted = 0;
  state.preempted.push(req);
}

function onFinished(state, args, r, req) {
  remove(state.running, req);
  remove(state.waiting, req);
  r.status = "done";
  r.reason = args.reason;
  r.by = args.by;
}

function onFreed(state, args, r, req) {
  for (const id of args.blocks) {
    release(state, id, req);
    remove(r.blocks, id);
  }
}

function onDetokenized(state, args, r) {
  if (typeof args.text === "string") r.text += args.text;
}

const HANDLERS = {
  "scheduler.created": (state, args) => {
    state.usable = args.num_blocks - 1; // block 0 is padding and never given to a request
    state.budget = args.max_num_batched_tokens;
    state.maxSeqs = args.max_num_seqs;
    state.policy = args.scheduler_config?.scheduling_policy ?? "fcfs";
    state.blockSize = args.cache_config?.block_size ?? 0;
  },
  "http.request": (state, args, r) => { if (r) r.status = "api"; },
  "request.registered": (state, args, r) => { r.status = "api"; },
  "zmq.request_sent": (state, args, r, req, event) => state.inFlight.push(event.at),
  "zmq.outputs_sent": (state, args, r, req, event) => state.inFlight.push(event.at),
  "zmq.request_received": (state, args, r, req, event) => remove(state.inFlight, event.cause),
  "zmq.outputs_received": (state, args, r, req, event) => remove(state.inFlight, event.cause),
  "sched.queued": (state, args, r, req) => {
    r.status = "waiting";
    r.prompt = r.total = args.num_prompt_tokens;
    r.priority = args.params?.priority ?? 0;
    r.arrival = state.arrivals++;
    enqueue(state, state.waiting, req);
  },
  "engine.step": onStep,
  "sched.admit": onAdmit,
  "sched.resume": onAdmit,
  "sched.prefix_hit": (state, args, r, req) => {
    r.cachedTokens = args.num_tokens;
    for (const id of args.blocks) hold(state, id, req);
  },
  "sched.scheduled": onScheduled,
  "spec.scheduled": (state, args, r) => { r.drafts = args.num_tokens; },
  "spec.verified": (state, args, r) => { r.accepted = args.accepted; },
  "sched.preempt": onPreempt,
  "sched.held_back": onHeldBack,
  "sched.output": (state, args) => {
    state.decided = true;
    state.budget = args.budget;
    state.freeRecorded = args.free_blocks;
  },
  "sched.token": (state, args, r) => {
    r.total = r.prompt + args.num_output_tokens;
    r.output = args.num_output_tokens;
    r.tokenIds.push(...(args.token_ids ?? []));
  },
  "sched.finished": onFinished,
  "kv.allocated": (state, args, r, req) => {
    for (const id of args.blocks) hold(state, id, req);
    r.blocks.push(...args.blocks);
  },
  "kv.freed": onFreed,
  "kv.cached": (state, args) => args.blocks.forEach((id) => { block(state, id).cached = true; }),
  "kv.evicted": (state, args) => { block(state, args.block).cached = false; },
  "kv.reset": (state, args) => { if (args.done) state.blocks.forEach((one) => { one.cached = false; }); },
  "request.tokenized": (state, args, r) => { r.askedFor = args.prompt ?? ""; },
  "request.detokenized": onDetokenized,
  "request.finished": (state, args, r) => { r.answered = true; },
  "request.aborted": (state, args, r) => { r.answered = true; r.reason ||= args.reason; },
  "engine.dead": (state, args) => { state.engineDead = args.message || "the engine process is gone"; },
  "engine.failed": (state, args) => { state.engineDead = args.message || "the engine failed"; },
};

/** Apply the next event to the state. */
function apply(state, event, placeOfId) {
  state.at = event.at;
  state.phase = event.phase || state.phase;
  state.lastOf[event.process] = event.at;
  const r = event.req >= 0 ? state.requests[event.req] : null;
  HANDLERS[event.name]?.(state, event.args, r, event.req, event, placeOfId);
}

/** One run: its tables, its events, and the state after each of them. */
class Recording {
  constructor(data) {
    this.title = data.title;
    this.processes = data.processes.map(([pid, name]) => ({ pid, name, isEngine: name.startsWith("EngineCore"), hasScheduler: false }));
    this.meanings = new Map(data.names.map(([name, phase, stage, meaning, vllm]) => [name, { phase, stage, meaning, vllm }]));
    this.requests = data.requests.map(([id, label]) => ({ id, label }));
    this.nameWidth = this.requests.reduce((most, { label }) => Math.max(most, Math.min(8, label.length)), 2); // letters
    this.placeOfId = new Map(data.requests.map(([id], at) => [id, at]));
    this.events = data.events.map((row, at) => this.#event(data, row, at));
    this.effects = new Map(); // place of an event -> places of those that it caused
    this.steps = []; // {step, start, decided, end}: places of events; decided = where the decision of the step is complete
    this.spans = this.requests.map(() => []); // request -> [{start, status}], for the timeline
    this.received = new Set(); // places of messages whose receipt was recorded
    this.numBlocks = 0; // ids below this one are named in the recording
    for (const event of this.events) {
      if (event.name === "scheduler.created" || event.name === "engine.step") this.processes[event.process].hasScheduler = true;
    }
    this.#readThrough();
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
    this.snapshots = [emptyState(this.requests.length)];
    const state = emptyState(this.requests.length);
    for (const event of this.events) {
      apply(state, event, this.placeOfId);
      this.#note(event, state);
      if ((event.at + 1) % this.every === 0) this.snapshots.push(structuredClone(state));
    }
    this.numBlocks = Math.max(state.blocks.length, 1);
    this.current = state;
  }

  #note(event, state) {
    if (event.cause >= 0) {
      if (!this.effects.has(event.cause)) this.effects.set(event.cause, []);
      this.effects.get(event.cause).push(event.at);
      this.received.add(event.cause);
    }
    const { at, name, ph } = event;
    if (name === "engine.step" && ph === "B") this.steps.push({ step: event.step, start: at, decided: at, end: at });
    const step = this.steps.at(-1);
    if (step && name === "sched.output") step.decided = at;
    if (step && name === "engine.step") step.end = at;
    if (event.req < 0) return;
    const spans = this.spans[event.req];
    const status = state.requests[event.req].status;
    if (spans.at(-1)?.status !== status) spans.push({ start: event.at, status });
  }

  /** The state after the event at this place. It is this recording's own: read it, and ask again later. */
  stateAt(at) {
    const snapshot = Math.floor((at + 1) / this.every);
    const behind = this.current.at > at;
    if (behind || at - this.current.at > this.every) this.current = structuredClone(this.snapshots[snapshot]);
    while (this.current.at < at) apply(this.current, this.events[this.current.at + 1], this.placeOfId);
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

  /** The event with which a request got its n-th output token; -1 if it never did. */
  tokenAt(req, n) {
    const found = this.events.find((e) => e.req === req && e.name === "sched.token" && e.args.num_output_tokens >= n);
    return found ? found.at : -1;
  }
}

/**
 * What was decided in a step and what came of it, one line each, with the arrivals and departures since the step before. Two runs are
 * compared by it (`stagetrace diff` compares the same); times, pids and the random parts of ids are not in it.
 */
function decisions(recording, k) {
  const lines = [];
  for (let at = k ? recording.steps[k - 1].end + 1 : 0; at <= recording.steps[k].end; at++) {
    const line = decision(recording, recording.events[at]);
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
    return `${args.first ? label(args.first) : "a request"} is held back: ${args.rule || "grammar"}, behind it ${behind}`;
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
  const places = runs.map((run) => run.steps.findIndex((one) => one.step === step));
  const lines = runs.map((run, i) => (places[i] < 0 ? ["there is no such step"] : decisions(run, places[i])));
  if (lines[0].join("\n") === lines[1].join("\n")) return null;
  const only = [0, 1].map((i) => lines[i].filter((line) => !lines[1 - i].includes(line)));
  return only[0].length + only[1].length ? only : [["the same, in a different order"], ["the same, in a different order"]];
}
