// Part 3 of 9: the playground. One request at a time; text is always streamed.

const form = byId("request");
const conversation = []; // of the chat: {role, content}
const ASK_AGAIN_MS = 1000;
let ended = null; // the completion that is shown and may go on: {text, words}; its text begins with the prompt
let running = null; // the AbortController of the request on its way

const tasks = document.body.dataset.tasks.split(" ");
const [writes, hears, classifies] = ["generate", "transcription", "classify"].map((task) => tasks.includes(task));
const MAKES = hears ? "this model writes down speech" : classifies ? "this model tells classes" : "this model makes vectors";

const isChat = () => writes && form.elements.kind.value === "chat";

function path() {
  if (writes) return isChat() ? "v1/chat/completions" : "v1/completions";
  return hears ? "v1/audio/transcriptions" : classifies ? "classify" : "v1/embeddings";
}

/** What will be sent: fields that were left empty are left out, so the server's defaults hold. */
function requestBody(prompt = form.elements.prompt.value) {
  const fields = form.elements;
  const body = { model: fields.model.value };
  if (!writes) return { ...body, input: prompt };
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
  const [file, model] = [form.elements.file.files[0], form.elements.model.value];
  const sound = [`-F ${quote(`file=@${file ? file.name : "speech.wav"}`)}`, `-F ${quote(`model=${model}`)}`];
  const json = () => [`-H "Content-Type: application/json"`, `-d ${quote(JSON.stringify(requestBody()))}`];
  return ["curl --no-buffer", quote(url), ...key, ...(hears ? sound : json())].join(" \\\n  ");
}

function showForm() {
  for (const element of document.querySelectorAll(".chat-only")) element.hidden = !isChat();
  for (const element of document.querySelectorAll(".text-only, #makes")) element.hidden = (element.id === "makes") === writes;
  for (const element of document.querySelectorAll(".sound-only, .prompt")) element.hidden = element.matches(".prompt") === hears;
  form.elements.prompt.required = !(form.elements.file.required = hears);
  byId("makes").textContent = MAKES;
  byId("continue").disabled = running !== null || !ended || isChat();
  byId("curl").textContent = curlCommand();
}

/** A turn in the output; returns the element that its text goes into. */
function addTurn(who, text) {
  const words = make("span", { class: "words" }, text);
  byId("output").append(make("p", { class: `turn ${who}` }, make("b", {}, who), " ", words));
  byId("output").scrollTop = byId("output").scrollHeight;
  return words;
}

/** What the model thinks, small, before the words of its answer. */
function showReasoning(text, words) {
  const before = words.previousElementSibling;
  const place = before.matches(".reasoning") ? before : make("span", { class: "reasoning caption" });
  if (place !== before) words.before(place);
  place.append(text);
}

function showBusy(busy) {
  byId("send").disabled = busy;
  byId("stop-request").disabled = !busy;
  for (const id of ["send-eight", "demonstrate"]) byId(id).disabled = busy;
  byId("continue").disabled = busy || !ended || isChat();
  byId("output").setAttribute("aria-busy", String(busy));
}

/** Read a stream to its end into `words` and `answer`, {text, reason, usage, first, last} with times in milliseconds. */
async function readAnswer(response, words, answer) {
  for await (const data of serverSentEvents(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) answer.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) continue;
    if (choice.delta?.reasoning) showReasoning(choice.delta.reasoning, words);
    const text = (choice.delta ? choice.delta.content : choice.text) ?? "";
    if (text) {
      answer.last = performance.now();
      if (!answer.first) byId("summary").textContent = "answering";
      answer.first ||= answer.last;
      answer.text += text;
      words.append(text);
      byId("output").scrollTop = byId("output").scrollHeight;
    }
    answer.reason = choice.finish_reason ?? answer.reason;
  }
}

/** What a model that writes no text makes of the input: a line per class, the first numbers of a vector, or what was said. */
async function askOnce(signal) {
  const how = { method: "POST", signal, body: JSON.stringify(requestBody()), headers: { "Content-Type": "application/json" } };
  if (hears) Object.assign(how, { body: new FormData(), headers: {} });
  if (hears) for (const name of ["file", "model"]) how.body.append(name, form.elements[name].files?.[0] ?? form.elements[name].value);
  const answer = await (await ask(path(), how)).json();
  if (hears) return answer.text;
  const { embedding, label, probs } = answer.data[0];
  if (classifies) return [`class ${label}`, ...probs.map((probability, place) => `${place}: ${probability.toFixed(4)}`)].join("\n");
  return `${embedding.length} numbers: ${embedding.slice(0, 8).map((number) => number.toFixed(4)).join(", ")}, ...`;
}

function summary({ usage, reason, first, last }, began) {
  if (!usage) return `ended: ${reason || "no reason given"}`;
  const parts = [`${usage.prompt_tokens} prompt tokens`, `${usage.completion_tokens} generated`, `ended: ${reason}`];
  if (first) parts.push(`first text after ${Math.round(first - began)} ms`);
  if (last > first) parts.push(`${Math.round(((usage.completion_tokens - 1) / (last - first)) * 1000)} tokens/s`);
  return parts.join(" · ");
}

/** Ask for what the form says or, with `before`, for how the completion that is shown goes on. */
async function send(before = null) {
  if (running) return;
  const prompt = before?.text ?? form.elements.prompt.value;
  ended = null;
  running = new AbortController();
  showBusy(true);
  byId("problem").textContent = "";
  byId("summary").textContent = writes ? "waiting for the first text" : "waiting";
  if (!isChat() && !before) byId("output").replaceChildren();
  if (!before) addTurn(isChat() ? "user" : "prompt", hears ? form.elements.file.files[0].name : prompt);
  const words = before?.words ?? addTurn(isChat() ? "assistant" : "answer", "");
  const answer = { text: "", reason: "", usage: null, first: 0, last: 0 };
  const began = performance.now();
  try {
    if (writes) {
      const how = { method: "POST", body: JSON.stringify(requestBody(prompt)), headers: { "Content-Type": "application/json" } };
      await readAnswer(await ask(path(), { ...how, signal: running.signal }), words, answer);
    } else words.append(await askOnce(running.signal));
    byId("summary").textContent = writes ? summary(answer, began) : `after ${Math.round(performance.now() - began)} ms`;
  } catch (error) {
    const stopped = error.name === "AbortError";
    byId("summary").textContent = stopped ? "stopped; the engine has freed its blocks" : "";
    if (!stopped) byId("problem").textContent = error.message;
  } finally {
    keepTurn(prompt, answer, words);
    if (writes && !isChat() && (answer.text || before)) ended = { text: prompt + answer.text, words };
    running = null;
    showBusy(false);
    showForm();
  }
}

/** A turn without any text, since it failed or was stopped at once, is taken back; of a chat what has come stays. */
function keepTurn(prompt, { text, reason }, words) {
  if (isChat() && (text || reason)) conversation.push({ role: "user", content: prompt }, { role: "assistant", content: text });
  if (text || reason || words.textContent) return;
  for (const turn of [words.parentElement.previousElementSibling, words.parentElement]) turn?.remove();
}

function stop() {
  if (running) running.abort();
}

function clear() {
  stop();
  ended = null;
  conversation.length = 0;
  byId("output").replaceChildren();
  byId("summary").textContent = byId("problem").textContent = "";
  showBusy(running !== null);
  showForm();
}

/** Fills the list of models; false if this server wants another key. Asks again until there is an answer: a page may be opened while the server
 * still loads its model. */
async function loadModels() {
  const key = byId("api-key").value;
  while (byId("api-key").value === key) {
    try {
      const response = await ask("v1/models");
      const names = (await response.json()).data.map((model) => model.id);
      form.elements.model.replaceChildren(...names.map((name) => make("option", {}, name)));
      byId("problem").textContent = "";
      showForm();
      return true;
    } catch (error) {
      byId("problem").textContent = error.message;
      showForm();
      if (error instanceof KeyNeeded) return false;
    }
    await new Promise((wake) => setTimeout(wake, ASK_AGAIN_MS));
  }
  return false;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
form.addEventListener("input", showForm);
byId("continue").addEventListener("click", () => send(ended));
byId("stop-request").addEventListener("click", stop);
byId("clear").addEventListener("click", clear);
byId("copy").addEventListener("click", async () => (byId("copied").textContent = await copyText(byId("curl"))));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
showBusy(false);
