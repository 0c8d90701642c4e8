// The static page's Python: Pyodide, msgspec, and the project's own scheduler. One scenario per message.
import { loadPyodide } from "./pyodide/pyodide.mjs";

let simulate = null;

async function start(wheel) {
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  await python.loadPackage(new URL(`./${wheel}`, import.meta.url).href, { messageCallback: () => {} });
  const sources = await fetch(new URL("./stages.zip", import.meta.url));
  python.unpackArchive(await sources.arrayBuffer(), "zip", { extractDir: "/stages" });
  simulate = python.runPython(`
import json, sys
sys.path[:0] = ["/stages", "/stages/trace"]
from stage01_cli.tools.lab.own_scheduler import OwnScheduler
from stage01_cli.tools.lab.simulate import simulate
lambda scenario, code: json.dumps(simulate(json.loads(scenario), None if code is None else OwnScheduler(text=code)))
`);
}

self.onmessage = async ({ data }) => {
  try {
    if (data.wheel) {
      await start(data.wheel);
      self.postMessage({ ready: true });
    } else {
      self.postMessage({ number: data.number, answer: simulate(data.scenario, data.own ?? undefined) });
    }
  } catch (error) {
    if (data.wheel) self.postMessage({ failed: String(error) });
    else self.postMessage({ number: data.number, answer: JSON.stringify({ problem: `Python failed: ${String(error).trim().split("\n").at(-1)}` }) });
  }
};
