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
  constructor(onStatus) {
    this.python = new BrowserPython({ wheels: [DATA.wheel], sources: "stages.zip", module: "stage01_cli.tools.lab.in_browser", megabytes: 14 }, onStatus);
  }

  async run(scenario, own) {
    const answer = await this.python.ask({ scenario, own }, CODE_SECONDS);
    return answer ?? { problem: `The scheduler was still at work after ${CODE_SECONDS} seconds, and was ended.` };
  }
}
