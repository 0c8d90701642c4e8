// Part 6 of 8: what a token could have been, where clients asked for logprobs: the likeliest candidates, and who was chosen.

const MAX_TOKENS = 24; // of an answer, in the row above the candidates
const visible = (text) => (text === "" ? "(part of a character)" : text.replaceAll("\n", "⏎").replaceAll(" ", "␣"));
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 2 : 1)} %`;

/** One token of a recording's answers: which candidates it had, and the row of tokens that leads to others. */
class ChancePanel {
  /** `seek(place of an event)` is what a click on a token asks for. */
  constructor(recording, section, seek) {
    Object.assign(this, { recording, section, seek });
    section.hidden = recording.chances.size === 0;
    this.tokens = new Items(section.querySelector(".tokens-of"));
    this.candidates = new Items(section.querySelector(".candidates"));
  }

  /** The token that was chosen last: of the current event's request, or else of any; `only`: of this request alone, if it is not -1. */
  draw(state, event, only) {
    if (this.section.hidden) return;
    const own = only >= 0 ? only : this.recording.chances.has(event.req) ? event.req : this.#latest(event.at);
    const place = own < 0 ? -1 : this.#placeAt(own, event.at);
    setText(this.section.querySelector(".chosen"), place < 0 ? "No token has been chosen yet." : this.#words(state, own, place));
    this.tokens.draw(place < 0 ? [] : this.#row(own, place));
    this.candidates.draw(place < 0 ? [] : this.#bars(own, place));
  }

  /** The last token of a request that the scheduler has received at this event; -1: none. */
  #placeAt(req, at) {
    return firstNotBelow(this.recording.tokensAt[req], at + 1) - 1;
  }

  #latest(at) {
    const requests = [...this.recording.chances.keys()].filter((req) => this.#placeAt(req, at) >= 0);
    const since = (req) => this.recording.tokensAt[req][this.#placeAt(req, at)];
    return requests.reduce((one, req) => (one < 0 || since(req) > since(one) ? req : one), -1);
  }

  /** Which token, in which step, and which blocks hold what was read for it. The blocks are known while the request has them. */
  #words(state, req, place) {
    const { recording } = this;
    const { step, process } = recording.events[recording.tokensAt[req][place]];
    const r = state.requests[req], size = state.engines[process].blockSize;
    const last = size ? Math.floor((r.prompt + place - 1) / size) : -1; // of the position that it was predicted from
    const read = last >= 0 && last < r.blocks.length ? r.blocks.slice(0, last + 1) : [];
    const blocks = read.length ? `read from block${read.length === 1 ? "" : "s"} ${read.join(" ")}` : "its request has given its blocks back";
    return `Token ${place + 1} of ${recording.label(req)}, step ${step}, ${blocks}.`;
  }

  /** The answer's tokens, the newest last: a button each. */
  #row(req, place) {
    const first = Math.max(0, place + 1 - MAX_TOKENS), tokens = this.recording.chances.get(req);
    return Array.from({ length: place + 1 - first }, (_, k) => {
      const n = first + k, now = n === place;
      const text = tokens[n] ? visible(tokens[n][0][0]) : "?";
      const create = () => {
        const button = make("button", { type: "button", title: `token ${n + 1}`, "aria-current": now ? "true" : null }, text);
        button.addEventListener("click", () => this.seek(this.recording.tokensAt[req][n]));
        return make("li", {}, button);
      };
      return [`${req} ${n}`, `${now}`, create];
    });
  }

  /** The candidates, the likeliest first; the chosen one is marked, and comes last if it is none of them. */
  #bars(req, place) {
    const [chosen, ...likely] = this.recording.chances.get(req)[place] ?? [];
    if (!chosen) return [["none", "", () => make("li", {}, "The recording holds no probabilities of it: it was made without --trace-prompts, or the client had left.")]];
    const isChosen = ([text, share]) => text === chosen[0] && share === chosen[1];
    const all = likely.some(isChosen) ? likely : [...likely, chosen];
    const bar = (one) => make("li", isChosen(one) ? { class: "is-chosen" } : {},
      make("span", { class: "mark" }, isChosen(one) ? "▶" : ""), make("span", { class: "text" }, visible(one[0])),
      make("span", { class: "bar", "aria-hidden": "true" }, make("i", { "--share": one[1], "--hue": hue(req) })),
      make("span", { class: "share" }, `${percent(one[1])}${isChosen(one) ? ", chosen" : ""}`));
    return all.map((one, k) => [`${req} ${place} ${k}`, "", () => bar(one)]);
  }
}
