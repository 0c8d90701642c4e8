// Python in this browser: Pyodide, wheels, and a module of the project that answers. One question per message: text in, text out.
import { loadPyodide } from "./pyodide/pyodide.mjs";

let answer = null;

async function bytes(name) {
  const found = await fetch(new URL(name, import.meta.url));
  if (!found.ok) throw new Error(`${name}: ${found.status}`);
  return found.arrayBuffer();
}

/** `start` names the wheels, the archive of the project's files, the module whose `answer(text) -> text` is asked, and the scripts that Python
 * imports as modules: name -> file, which exports `prepare(bytes)`. */
async function begin({ wheels, sources, module, modules = {} }) {
  const archives = [...wheels.map((wheel) => bytes(wheel)), bytes(sources)];
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  const loaded = await Promise.all(archives);
  loaded.slice(0, -1).forEach((wheel) => python.unpackArchive(wheel, "wheel"));
  python.unpackArchive(loaded.at(-1), "zip", { extractDir: "/stages" });
  python.registerJsModule("this_page", { tell: (text) => self.postMessage({ told: text }) });
  for (const [name, file] of Object.entries(modules)) {
    const script = await import(new URL(file, import.meta.url));
    await script.prepare(bytes);
    python.registerJsModule(name, script);
  }
  answer = python.runPython(`
import importlib, sys
sys.path[:0] = ["/stages", "/stages/trace"]
importlib.import_module("${module}").answer
`);
}

self.onmessage = async ({ data }) => {
  try {
    if (data.start) {
      await begin(data.start);
      self.postMessage({ ready: true });
    } else {
      self.postMessage({ number: data.number, answer: answer(data.question) });
    }
  } catch (error) {
    if (data.start) self.postMessage({ failed: String(error) });
    else self.postMessage({ number: data.number, answer: JSON.stringify({ problem: `Python failed: ${String(error).trim().split("\n").at(-1)}` }) });
  }
};
