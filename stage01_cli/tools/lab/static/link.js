// Part 1 of 5: a scenario as a link. All of it stands in the fragment, which no browser sends to a server:
// #v=1&t=16&n=33&s=8&m=8&l=0&p=fcfs&c=1&x=1&r=a.1.6.24,b.2.9.18.A8,c.3.4.20..-1
// (r: name.arrival.prompt.output, then if need be .prefix and its length, then .priority)

const DATA = JSON.parse(document.getElementById("data").textContent);
const LINK_VERSION = "1";
const KEYS = {
  t: "max_num_batched_tokens", n: "num_gpu_blocks_override", s: "block_size", m: "max_num_seqs", l: "long_prefill_token_threshold",
  c: "enable_chunked_prefill", x: "enable_prefix_caching", p: "scheduling_policy",
};
const LINK_LENGTH = 8000; // longer ones are cut by mail programs and chats; 64 requests need about 2000

class LinkError extends Error {}

/** A scenario with every field filled in. */
function complete(scenario) {
  const settings = Object.fromEntries(Object.entries(DATA.fields).map(([name, [, , value]]) => [name, value]));
  for (const name of DATA.switches) settings[name] = true;
  settings.scheduling_policy = "fcfs";
  const plain = { id: "", ...Object.fromEntries(Object.entries(DATA.request_fields).map(([name, [, , value]]) => [name, value])), prefix: "" };
  return { settings: { ...settings, ...scenario.settings }, requests: scenario.requests.map((request) => ({ ...plain, ...request })) };
}

function writeLink({ settings, requests }) {
  const plain = (value) => (typeof value === "boolean" ? Number(value) : value);
  const words = Object.entries(KEYS).map(([key, name]) => `${key}=${plain(settings[name])}`);
  const rows = requests.map(({ id, arrival, prompt, output, prefix, shared, priority }) => {
    const parts = [id, arrival, prompt, output, prefix && shared ? prefix + shared : "", priority || ""];
    while (parts.at(-1) === "") parts.pop();
    return parts.join(".");
  });
  return `#v=${LINK_VERSION}&${words.join("&")}&r=${rows.join(",")}`;
}

/** The scenario of a fragment. Throws LinkError, which says what is wrong with it. */
function readLink(fragment) {
  const text = fragment.replace(/^#/, "");
  if (text.length > LINK_LENGTH) throw new LinkError(`it has ${text.length} characters, and at most ${LINK_LENGTH} are read`);
  const words = new Map();
  for (const word of text.split("&")) {
    const [key, ...rest] = word.split("=");
    if (words.has(key)) throw new LinkError(`${quote(key)} stands in it twice`);
    words.set(key, rest.join("="));
  }
  if (!words.has("v")) throw new LinkError("it does not begin with v=1");
  if (words.get("v") !== LINK_VERSION) throw new LinkError(`it is of version ${quote(words.get("v"))}, and this page reads version ${LINK_VERSION}`);
  words.delete("v");
  if (!words.has("r")) throw new LinkError("it has no requests (r=...)");
  const requests = words.get("r").split(",").map(readRequest);
  words.delete("r");
  const settings = {};
  for (const [key, value] of words) {
    if (!Object.hasOwn(KEYS, key)) throw new LinkError(`${quote(key)} is no setting`);
    settings[KEYS[key]] = readSetting(KEYS[key], value);
  }
  if (requests.length > DATA.max_requests) throw new LinkError(`it has ${requests.length} requests, and at most ${DATA.max_requests} are possible`);
  const ids = requests.map(({ id }) => id);
  const twice = ids.find((id, place) => ids.indexOf(id) < place);
  if (twice !== undefined) throw new LinkError(`two requests are called ${twice}`);
  return complete({ settings, requests });
}

function readSetting(name, value) {
  if (DATA.switches.includes(name)) {
    if (value !== "0" && value !== "1") throw new LinkError(`${name} must be 0 or 1, not ${quote(value)}`);
    return value === "1";
  }
  if (name === "scheduling_policy") {
    if (!DATA.policies.includes(value)) throw new LinkError(`${name} must be one of ${DATA.policies.join(", ")}, not ${quote(value)}`);
    return value;
  }
  return readNumber(value, name, DATA.fields[name]);
}

function readNumber(value, what, [least, most]) {
  if (!/^-?\d{1,5}$/.test(value) || Number(value) < least || Number(value) > most) throw new LinkError(`${what} must be a whole number from ${least} to ${most}, not ${quote(value)}`);
  return Number(value);
}

function readRequest(text, place) {
  const [id, arrival, prompt, output, shared = "", priority = "", ...rest] = text.split(".");
  const problem = nameProblem(id);
  if (problem) throw new LinkError(`request number ${place + 1}: ${problem}`);
  if (output === undefined || rest.length) throw new LinkError(`request ${id} must look like name.arrival.prompt.output, not ${quote(text)}`);
  const number = (value, name) => readNumber(value, `${name} of request ${id}`, DATA.request_fields[name]);
  const request = { id, arrival: number(arrival, "arrival"), prompt: number(prompt, "prompt"), output: number(output, "output") };
  if (shared) {
    if (!DATA.prefixes.includes(shared[0])) throw new LinkError(`the prefix of request ${id} must be one of ${[...DATA.prefixes].join(", ")}, not ${quote(shared)}`);
    Object.assign(request, { prefix: shared[0], shared: number(shared.slice(1), "shared") });
    if (request.shared > request.prompt) throw new LinkError(`request ${id} shares ${request.shared} tokens, but its prompt has only ${request.prompt}`);
  }
  if (priority) request.priority = number(priority, "priority");
  return request;
}

/** What is wrong with a request's name, or "". */
function nameProblem(name) {
  return /^[A-Za-z0-9_-]{1,12}$/.test(name) && /[A-Za-z0-9]/.test(name) ? "" : `a name must be 1 to 12 letters, digits, - or _, not ${quote(name)}`;
}

const quote = (text) => JSON.stringify(text.length > 24 ? `${text.slice(0, 24)}...` : text);
