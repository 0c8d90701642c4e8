// Part 2 of 5: who simulates: the server, or Python in this browser.

const CODE_SECONDS = 10; // a scheduler written into the page may take as long in the browser

/** Asks the small server. Code is sent with the key of the printed link; without one the server takes none. */
class ServerSimulator {
  constructor() {
    this.ready = Promise.resolve();
    const link = new URL(location.href);
    if (link.searchParams.has("key")) {
      sessionStorage.setItem("stages-lab-key", link.searchParams.get("key")); // survives a reload, and is no part of a link that is copied
      link.searchParams.delete("key");
      history.replaceState(null, "", link);
    }
    this.key = sessionStorage.getItem("stages-lab-key");
  }

  async run(scenario, own) {
    const key = own ? { "X-Lab-Key": this.key } : {};
    const answer = await fetch("simulate", {
      method: "POST", headers: { "Content-Type": "application/json", ...key }, body: JSON.stringify({ scenario, own: own !== null, code: own || null }),
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
