// Python in a worker of this browser: questions go in, answers come out, and what never ends is ended with its worker.

class BrowserPython {
  #worker = null;
  #answers = new Map();
  #number = 0;
  #giveUp = () => {};

  /** `start` is what worker.js is told first; `onStatus` hears what to show while it loads, `onTold` what Python tells in between. */
  constructor(start, onStatus, onTold = () => {}) {
    Object.assign(this, { start, onStatus, onTold });
    this.restart();
  }

  /** A new worker in the place of the old one; who waits for an answer of that hears null. */
  restart() {
    this.#worker?.terminate();
    this.#answers.forEach((resolve) => resolve(null));
    this.#answers.clear();
    this.#giveUp(); // who waits for the old one to be ready hears that it never will be
    this.onStatus(`Python is loading: about ${this.start.megabytes} MB, once.`);
    this.ready = new Promise((resolve, reject) => {
      this.#giveUp = () => resolve(false);
      this.#worker = new Worker("worker.js", { type: "module" }); // from a file it throws
      this.#worker.onerror = (event) => reject(new Error(event.message || "the worker could not be loaded"));
      this.#worker.onmessage = ({ data }) => {
        if (data.ready) {
          this.onStatus("");
          resolve(true);
        } else if (data.failed) reject(new Error(data.failed));
        else if (data.told) this.onTold(data.told);
        else this.#answers.get(data.number)?.(data.answer);
      };
      this.#worker.postMessage({ start: this.start });
    });
    this.ready.catch(() => this.onStatus(""));
  }

  /** The answer, from JSON to JSON; null if there was none within so many seconds, or the worker was ended. */
  async ask(question, seconds) {
    if (!(await this.ready)) return null;
    const number = ++this.#number;
    const answer = new Promise((resolve) => this.#answers.set(number, resolve));
    this.#worker.postMessage({ number, question: JSON.stringify(question) });
    const clock = setTimeout(() => this.restart(), seconds * 1000);
    const text = await answer;
    clearTimeout(clock);
    this.#answers.delete(number);
    return text === null ? null : JSON.parse(text);
  }
}
