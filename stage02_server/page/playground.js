// Part 2 of 4: the playground. One request at a time, always streamed.

const form = byId("request");
const conversation = []; // of the chat: {role, content}
let running = null; // the AbortController of the request on its way

const isChat = () => form.elements.kind.value === "chat";
const path = () => (isChat() ? "v1/chat/completions" : "v1/completions");

/** What will be sent: fields that were left empty are left out, so the server's defaults hold. */
function requestBody() {
  const fields = form.elements;
  const body = { model: fields.model.value };
  const prompt = fields.prompt.value;
  if (isChat()) {
    const system = fields.system.value ? [{ role: "system", content: fields.system.value }] : [];
    body.messages = [...system, ...conversation, { role: "user", content: prompt }];
  } else {
    body.prompt = prompt;
  }
  for (const name of ["max_tokens", "temperature", "top_p", "top_k", "seed"]) {
    if (fields[name].value !== "") body[name] = Number(fields[name].value);
  }
  if (fields.stop.value) body.stop = [fields.stop.value];
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

/** The same request for a terminal; a key appears by the name of a variable only. */
function curlCommand() {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const key = byId("api-key").value ? [`-H "Authorization: Bearer $OPENAI_API_KEY"`] : [];
  const url = new URL(path(), document.baseURI).href;
  return ["curl --no-buffer", quote(url), `-H "Content-Type: application/json"`, ...key, `-d ${quote(JSON.stringify(requestBody()))}`].join(" \\\n  ");
}

function showForm() {
  for (const element of document.querySelectorAll(".chat-only")) element.hidden = !isChat();
  byId("curl").textContent = curlCommand();
}

/** A turn in the output; returns the element that its text goes into. */
function addTurn(who, text) {
  const words = make("span", { class: "words" }, text);
  byId("output").append(make("p", { class: `turn ${who}` }, make("b", {}, who), " ", words));
  byId("output").scrollTop = byId("output").scrollHeight;
  return words;
}

function showBusy(busy) {
  byId("send").disabled = busy;
  byId("stop-request").disabled = !busy;
  byId("output").setAttribute("aria-busy", String(busy));
}

/** Read a stream to its end into `words`; returns {text, reason, usage, first, last}, times in milliseconds. */
async function readAnswer(response, words) {
  const answer = { text: "", reason: "", usage: null, first: 0, last: 0 };
  for await (const data of serverSentEvents(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) answer.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) continue;
    const text = (choice.delta ? choice.delta.content : choice.text) ?? "";
    if (text) {
      answer.last = performance.now();
      answer.first ||= answer.last;
      answer.text += text;
      words.append(text);
      byId("output").scrollTop = byId("output").scrollHeight;
    }
    answer.reason = choice.finish_reason ?? answer.reason;
  }
  return answer;
}

function summary({ usage, reason, first, last }, began) {
  if (!usage) return `ended: ${reason || "no reason given"}`;
  const parts = [`${usage.prompt_tokens} prompt tokens`, `${usage.completion_tokens} generated`, `ended: ${reason}`];
  if (first) parts.push(`first text after ${Math.round(first - began)} ms`);
  if (last > first) parts.push(`${Math.round(((usage.completion_tokens - 1) / (last - first)) * 1000)} tokens/s`);
  return parts.join(" · ");
}

async function send() {
  if (running) return;
  const body = requestBody();
  const prompt = form.elements.prompt.value;
  running = new AbortController();
  showBusy(true);
  byId("problem").textContent = "";
  byId("summary").textContent = "waiting for the first text";
  if (!isChat()) byId("output").replaceChildren();
  addTurn(isChat() ? "user" : "prompt", prompt);
  const words = addTurn(isChat() ? "assistant" : "answer", "");
  const began = performance.now();
  try {
    const how = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal: running.signal };
    const response = await fetch(path(), how);
    if (!response.ok) throw await failure(response);
    const answer = await readAnswer(response, words);
    if (isChat()) conversation.push({ role: "user", content: prompt }, { role: "assistant", content: answer.text });
    byId("summary").textContent = summary(answer, began);
  } catch (error) {
    const stopped = error.name === "AbortError";
    byId("summary").textContent = stopped ? "stopped; the engine has freed its blocks" : "";
    if (!stopped) byId("problem").textContent = error.message;
  } finally {
    running = null;
    showBusy(false);
    showForm();
  }
}

function stop() {
  if (running) running.abort();
}

function clear() {
  stop();
  conversation.length = 0;
  byId("output").replaceChildren();
  byId("summary").textContent = byId("problem").textContent = "";
  showForm();
}

async function loadModels() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw await failure(response);
    const names = (await response.json()).data.map((model) => model.id);
    form.elements.model.replaceChildren(...names.map((name) => make("option", {}, name)));
    byId("problem").textContent = "";
  } catch (error) {
    byId("problem").textContent = error.message;
  }
  showForm();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
form.addEventListener("input", showForm);
byId("stop-request").addEventListener("click", stop);
byId("clear").addEventListener("click", clear);
byId("copy").addEventListener("click", () => navigator.clipboard.writeText(byId("curl").textContent));
byId("api-key").addEventListener("change", loadModels);
byId("key-form").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
showBusy(false);
loadModels();
