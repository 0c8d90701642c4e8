// Part 2 of 5: who simulates: the server, or Python in this browser.

const CODE_SECONDS = 10; // a scheduler written into the page may take as long in the browser

/** Asks the small server. */
class ServerSimulator {
  constructor() {
    this.ready = Promise.resolve();
  }

  async run(scenario, own) {
    const answer = await fetch("simulate", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ scenario, own: own !== null }),
    });
    return answer.json();
  }
}

/** Runs the same Python in a worker of this browser. A scheduler that loops is ended with its worker. */
class BrowserSimulator {
  #worker = null;
  #answers = new Map();
  #number = 0;

  constructor(onStatus) {
    this.onStatus = onStatus;
    this.#start();
  }

  #start() {
    this.onStatus("Python is loading: about 14 MB, once.");
    this.ready = new Promise((resolve, reject) => {
      this.#worker = new Worker("worker.js", { type: "module" }); // from a file it throws
      this.#worker.onerror = (event) => reject(new Error(event.message || "the worker could not be loaded"));
      this.#worker.onmessage = ({ data }) => {
        if (data.ready) {
          this.onStatus("");
          resolve();
        } else if (data.failed) reject(new Error(data.failed));
        else this.#answers.get(data.number)?.(data.answer);
      };
      this.#worker.postMessage({ wheel: DATA.wheel });
    });
    this.ready.catch(() => this.onStatus(""));
  }

  async run(scenario, own) {
    await this.ready;
    const number = ++this.#number;
    const answer = new Promise((resolve) => this.#answers.set(number, resolve));
    this.#worker.postMessage({ number, scenario: JSON.stringify(scenario), own });
    let clock;
    const late = new Promise((resolve) => (clock = setTimeout(() => resolve(null), CODE_SECONDS * 1000)));
    const text = await Promise.race([answer, late]);
    clearTimeout(clock);
    this.#answers.delete(number);
    if (text !== null) return JSON.parse(text);
    this.#worker.terminate();
    this.#start();
    return { problem: `The scheduler was still at work after ${CODE_SECONDS} seconds, and was ended.` };
  }
}
