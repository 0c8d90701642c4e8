"use strict";
// Part 1 of 9: what both halves of the page need: elements, and server-sent events over fetch (EventSource cannot send a key).

/** A DOM element: make("li", {class: "chip"}, "text", child, ...). Strings become text nodes, so nothing in them is ever markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);

/** A function that runs `work` with the next picture, once, however often it is called before. */
function once(work) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      work();
    });
  };
}

/** Headers of every request. The key is in its field, and key.js keeps one that was accepted. */
function headers(more = {}) {
  const key = byId("api-key").value;
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

class KeyNeeded extends Error {} // waiting does not help: somebody has to type it
class NotOffered extends Error {} // nor here: this server has no such route, or keeps it closed

/** An answer with status 200; every other one is an Error that says in words what is wrong. */
async function ask(path, how = {}) {
  if (/[^\x21-\x7e]/.test(byId("api-key").value)) throw new KeyNeeded("the API key in the field at the top has a character that no header can carry");
  const response = await fetch(path, { ...how, headers: headers(how.headers) }).catch(explain);
  if (!response.ok) throw await failure(response);
  return response;
}

/** Rethrows an error; if the server is gone, with our words and not the browser's. */
function explain(error) {
  throw error.name === "TypeError" ? new Error(`no answer from ${location.host}: the server has ended, or cannot be reached`) : error;
}

/** The error that an answer with another status than 200 holds. */
async function failure(response) {
  if (response.status === 401) return new KeyNeeded(byId("api-key").value ? "this server refuses the API key in the field at the top" : "this server wants an API key: put it into the field at the top");
  let message = `HTTP status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not one of the server's own answers: use the status
  }
  return response.status === 404 ? new NotOffered(message) : new Error(message);
}

/** The data of each server-sent event of an answer, as text. */
async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(explain);
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
  }
}
