// Part 4 of 9: from one scheduler's events to its state: who runs, who waits, who holds which block, what each step did.

const STEPS_KEPT = 96; // columns of the pictures
const ENDED_KEPT = 8; // requests that have ended and are still listed

class EngineState {
  /** `labels`: request id -> 1, 2, 3, ... in the order in which this page saw them; several engines share it. */
  constructor(labels = new Map()) {
    this.labels = labels;
    this.clear();
  }

  /** Begin from nothing: another process takes the place of the one before. */
  clear() {
    this.known = false; // nothing means anything before the first sched.state
    this.settings = { num_blocks: 0, block_size: 0, max_num_batched_tokens: 0, max_num_seqs: 0 };
    this.drafts = []; // by their place among a request's drafts: {verified, accepted}
    this.#forget();
  }

  #forget() {
    this.requests = new Map(); // id -> {status, prompt, tokens, computed, given, note}
    this.holders = new Map(); // block -> Set of request ids
    this.cached = new Set(); // blocks in the prefix cache
    // {step, given: Map id -> [tokens, of the prompt?], preempted: Set, total, budget, at: ns, ms: how long it took, made: tokens,
    //  firsts: [[id, ms since it arrived]], gaps: [ms since that request's token before], waiting: ids, ended: ids}
    this.steps = [];
    this.ended = []; // ids, the newest last
    this.step = 0;
    this.free = 0;
    this.unlisted = 0; // requests that the state left out
    this.heldBack = "";
    this.#open = null;
    this.#tokensAt = null;
  }

  #open = null; // the step that is being decided
  #tokensAt = null; // when the last tokens came, in ns; null: the engine had nothing to do since

  /** The same, for itself: what is applied to one does not change the other. Names are shared. */
  copy() {
    const other = new EngineState(this.labels);
    for (const name of Object.keys(this)) if (name !== "labels") other[name] = structuredClone(this[name]);
    other.#open = structuredClone(this.#open);
    other.#tokensAt = this.#tokensAt;
    return other;
  }

  count(status) {
    let count = 0;
    for (const request of this.requests.values()) count += request.status === status;
    return count;
  }

  label(id) {
    return `r${this.labels.get(id) ?? "?"}`;
  }

  /** Apply one trace event. */
  apply({ name, req, step, args, ts }) {
    if (name === "sched.state") this.#restart(step, args);
    else if (this.known) EngineState.#RULES[name]?.call(this, args, req, step, ts);
  }

  #restart(step, { requests, free_blocks, cached, settings, running, waiting }) {
    const before = this.steps;
    this.#forget();
    this.known = true;
    this.steps = before; // keep what was seen
    this.step = step;
    this.settings = settings;
    this.free = free_blocks;
    this.cached = new Set(cached);
    for (const { req, status, num_prompt_tokens, num_tokens, num_computed, blocks } of requests) {
      const mine = this.#request(req);
      Object.assign(mine, { status: status.startsWith("waiting") ? "waiting" : status, prompt: num_prompt_tokens, tokens: num_tokens, computed: num_computed });
      this.#hold(req, blocks);
    }
    this.unlisted = running + waiting - requests.length;
  }

  #request(id) {
    if (!this.labels.has(id)) this.labels.set(id, this.labels.size + 1);
    if (!this.requests.has(id)) {
      this.requests.set(id, { status: "waiting", prompt: 0, tokens: 0, computed: 0, given: 0, note: "" });
      this.unlisted -= this.unlisted > 0 ? 1 : 0;
    }
    return this.requests.get(id);
  }

  #hold(id, blocks) {
    for (const block of blocks) {
      if (!this.holders.has(block)) this.holders.set(block, new Set());
      this.holders.get(block).add(id);
    }
  }

  #release(id, blocks) {
    for (const block of blocks) {
      const who = this.holders.get(block);
      who?.delete(id);
      if (!who?.size) this.holders.delete(block);
    }
    this.free = this.settings.num_blocks - this.holders.size;
  }

  #deciding(step) {
    if (this.#open?.step !== step) {
      this.#open = { step, given: new Map(), preempted: new Set(), total: 0, budget: 0, ms: null, made: 0, firsts: [], gaps: [], waiting: [], ended: [] };
    }
    return this.#open;
  }

  /** The step lasts at least until now. It began when the tokens of the one before came or, if the engine was idle, when it was decided. */
  #lasts(done, ts) {
    done.began ??= this.#tokensAt ?? done.at;
    done.ms = (ts - done.began) / 1e6;
    this.#tokensAt = ts;
  }

  #decided(step) {
    return this.steps.findLast((done) => done.step === step);
  }

  static #RULES = {
    "sched.queued"({ num_prompt_tokens }, id, _, ts) {
      this.requests.delete(id);
      Object.assign(this.#request(id), { arrived: ts, prompt: num_prompt_tokens, tokens: num_prompt_tokens });
    },
    "sched.admit"({ num_prompt_tokens }, id) {
      Object.assign(this.#request(id), { status: "running", prompt: num_prompt_tokens, note: "" });
    },
    "sched.resume"({ num_tokens }, id) {
      Object.assign(this.#request(id), { status: "running", tokens: num_tokens, note: "resumed" });
    },
    "sched.prefix_hit"({ blocks, num_tokens }, id) {
      this.#request(id).note = `${num_tokens} tokens found in the prefix cache`;
      this.#hold(id, blocks);
    },
    "sched.scheduled"({ num_tokens, num_computed, missing }, id, step) {
      const request = this.#request(id);
      const ofPrompt = num_computed < request.prompt;
      Object.assign(request, { status: "running", computed: num_computed + num_tokens, tokens: num_computed + missing, given: num_tokens });
      this.#deciding(step).given.set(id, [num_tokens, ofPrompt]);
    },
    "sched.preempt"({ num_computed, swapped, needed_by }, id, step) {
      const note = needed_by === id ? "preempted: no block is left for it" : `preempted for ${this.label(needed_by)}`;
      Object.assign(this.#request(id), { status: "preempted", computed: swapped ? num_computed : 0, given: 0, note });
      this.#deciding(step).preempted.add(id);
    },
    "sched.held_back"({ rule, first }, _, step) {
      this.#deciding(step).heldBack = first ? `${this.label(first)} waits: ${EngineState.HELD_BACK[rule] ?? rule}` : "";
    },
    "sched.token"({ num_tokens, num_output_tokens }, id, step, ts) {
      const request = this.#request(id);
      const done = this.#decided(step);
      if (done) {
        this.#lasts(done, ts);
        done.made += num_tokens;
        if (request.tokenAt !== undefined) done.gaps.push((ts - request.tokenAt) / 1e6 / num_tokens);
        else if (request.arrived !== undefined) done.firsts.push([id, (ts - request.arrived) / 1e6]);
      }
      request.tokenAt = ts;
      request.tokens = request.prompt ? request.prompt + num_output_tokens : request.tokens + num_tokens;
      // Accepted drafts are computed, the newest token is not. Who was preempted while a token was held back has nothing computed.
      if (request.status === "running") request.computed = request.tokens - 1;
    },
    "sched.finished"({ reason, by }, id, step) {
      this.#decided(step)?.ended.push(id);
      Object.assign(this.#request(id), { status: "ended", given: 0, note: by === "outside" ? `${reason}, from outside` : by });
      this.ended = this.ended.filter((other) => other !== id);
      this.ended.push(id);
      while (this.ended.length > ENDED_KEPT) this.requests.delete(this.ended.shift());
      if (this.requests.size === this.ended.length) this.#tokensAt = null;
    },
    "sched.output"({ total_tokens, budget, free_blocks }, _, step, ts) {
      const before = this.steps.at(-1);
      if (before?.ms === null && this.#tokensAt !== null) this.#lasts(before, ts); // it made no token: only a part of a prompt
      const done = this.#deciding(step);
      this.#tokensAt ??= ts;
      for (const [id, { status }] of this.requests) if (status === "waiting" || status === "preempted") done.waiting.push(id);
      for (const [id, request] of this.requests) if (!done.given.has(id)) request.given = 0;
      Object.assign(done, { total: total_tokens, budget, at: ts });
      this.steps = [...this.steps, done].slice(-STEPS_KEPT);
      this.step = step;
      this.free = free_blocks;
      this.heldBack = done.heldBack ?? "";
      this.#open = null;
    },
    "kv.allocated"({ blocks }, id) {
      this.#hold(id, blocks);
      this.free = this.settings.num_blocks - this.holders.size;
    },
    "kv.freed"({ blocks }, id) {
      this.#release(id, blocks);
    },
    "kv.cached"({ blocks }) {
      for (const block of blocks) this.cached.add(block);
    },
    "kv.evicted"({ block }) {
      this.cached.delete(block);
    },
    "kv.reset"({ done }) {
      if (done) this.cached.clear();
    },
    "spec.verified"({ accepted, drafted }) {
      for (let place = 0; place < drafted; place++) {
        const count = (this.drafts[place] ??= { verified: 0, accepted: 0 });
        count.verified += 1;
        count.accepted += place < accepted;
      }
    },
  };

  static HELD_BACK = {
    budget: "the token budget of this step is spent",
    max_num_seqs: "as many requests run as may",
    blocks: "too few KV-cache blocks are free",
    no_chunking: "its prompt does not fit into what is left of the budget",
    hooks: "the encoder has no room for its next image in this step",
    preempted: "a running request was just preempted",
  };
}
