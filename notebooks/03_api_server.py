# %% [markdown]
# # 03 The API server starts
#
# *Before: [02](02_serve.ipynb) · about 45 minutes with the exercise*
#
# **Question.** A server must bind a port, start an engine that loads a model, import a web framework and build an application. In which order, and
# what happens at the same time?
#
# | part | here | vLLM |
# |---|---|---|
# | order of everything | [`run_server`](../stage02_server/api_server.py), [`run_server_worker`](../stage02_server/api_server.py) | `entrypoints/openai/api_server.py` |
# | the socket | [`setup_server`](../stage02_server/api_server.py) | setup_server, create_server_socket |
# | the configuration | [`EngineArgs.create_engine_config`](../stage03_engine/arg_utils.py) | `engine/arg_utils.py` |
# | application and routes | [`build_app`](../stage02_server/api_server.py), [routes](../stage02_server/routes.py) | build_app, router |
# | what the routes find | [`init_app_state`](../stage02_server/api_server.py) | init_app_state |
# | serving, signals | [`serve_http`](../stage02_server/launcher.py) | `entrypoints/launchers/launcher.py` serve_http |

# %%
import subprocess
import sys
import time

import lab
import matplotlib.pyplot as plt

from stage02_server import api_server
from stagetrace import read_run
from stagetrace.figures.style import request_look

lab.source(api_server.run_server_worker)

# %% [markdown] tags=["predict"]
# > **Predict.** Six things: (a) the port is bound, (b) the engine process is started, (c) the web framework is imported and the application is built,
# > (d) the weights are loaded, (e) the KV cache is allocated, (f) the server is ready. In which order? Which of them happen in another process?
# > And which one takes longest?

# %% tags=["predict"]
lab.predict(order=None, in_another_process=None)  # letters, such as "abcdef"

# %%
with lab.serve() as server:
    pass
run = read_run(server.folder)
first = {}
for event in run.events:
    first.setdefault(event.name, event.ts)
start = first["cli.main"]
ms = {name: (ts - start) / 1e6 for name, ts in first.items()}
SPANS = [  # (process, what, from, to)
    ("APIServer", "parse, find the model", "cli.main", "server.socket_bound"),
    ("APIServer", "import the front end", "server.socket_bound", "engine.spawned"),
    ("APIServer", "tokenizer, processors", "engine.spawned", "output_processor.created"),
    ("APIServer", "import FastAPI, build the app", "output_processor.created", "server.app_built"),
    ("APIServer", "handlers into the state", "server.app_built", "server.state_ready"),
    ("APIServer", "wait for the engine", "server.state_ready", "output_handler.started"),
    ("APIServer", "say that it is ready", "output_handler.started", "server.listening"),
    ("EngineCore", "start Python, import torch", "engine.spawned", "engine.hello"),
    ("EngineCore", "handshake, executor", "engine.hello", "executor.created"),
    ("EngineCore", "weights", "executor.created", "weights.loaded"),
    ("EngineCore", "pack the weights, KV cache", "weights.loaded", "kv_cache.allocated"),
    ("EngineCore", "record decode steps, scheduler", "kv_cache.allocated", "scheduler.created"),
    ("EngineCore", "threads, collect garbage", "scheduler.created", "engine.ready"),
]
lab.table([(p, what, ms[a], ms[b] - ms[a]) for p, what, a, b in SPANS], "process", "what", "begins at ms", "takes ms")

# %%
figure, axes = plt.subplots(figsize=(8.5, 3.4), dpi=80)
for row, (process, _, a, b) in enumerate(SPANS):
    api = process == "APIServer"
    axes.barh(
        row,
        ms[b] - ms[a],
        left=ms[a],
        color=request_look(0 if api else 1).face,
        hatch="" if api else "///",
        edgecolor="black",
    )
for name, label in (("server.socket_bound", " port bound"), ("server.listening", " listening")):
    axes.axvline(ms[name], color="black", linestyle=":")
    axes.annotate(label, (ms[name], len(SPANS) - 0.3), fontsize=8, annotation_clip=False)
axes.set_yticks(range(len(SPANS)), [f"{process}: {what}" for process, what, _, _ in SPANS], fontsize=8)
axes.set_ylim(-0.6, len(SPANS) + 0.4)
axes.invert_yaxis()
axes.set_xlabel("ms since the command line program started (hatched: the engine's process)")
figure.tight_layout()
lab.picture(figure)

# %%
both = ms["engine.hello"] - ms["engine.spawned"], ms["server.state_ready"] - ms["output_processor.created"]
print(f"the engine's imports and the API server's own work overlap for {min(both):.0f} ms")
print(
    f"until listening: {ms['server.listening']:.0f} ms; one after the other it would be about {ms['server.listening'] + min(both):.0f} ms"
)
print(f"weights of the bundled model: {ms['weights.loaded'] - ms['executor.created']:.1f} ms of that")
lab.claim(
    "bound, engine started, application built, weights loaded, KV cache allocated, listening: in this order",
    ms["server.socket_bound"] < ms["engine.spawned"] < ms["server.app_built"]
    and ms["engine.spawned"] < ms["weights.loaded"] < ms["kv_cache.allocated"] < ms["server.listening"],
)
longest = max(SPANS[7:], key=lambda span: ms[span[3]] - ms[span[2]])  # of the engine: the API server waits for it
lab.claim(
    f"of the engine's parts the longest is: {longest[1]}", longest[1] == "start Python, import torch", measured=True
)
begin = time.perf_counter()
subprocess.run([sys.executable, "-c", "import torch"], check=True)
alone, hello = (time.perf_counter() - begin) * 1e3, ms["engine.hello"] - ms["engine.spawned"]
lab.say(
    f"A process that does nothing but `import torch` takes {alone:.0f} ms, and the engine {hello:.0f} ms until it says hello."
)
lab.claim("so most of that is the import of torch", alone > hello / 2, measured=True)
SIX = dict(
    a="server.socket_bound",
    b="engine.spawned",
    c="server.app_built",
    d="weights.loaded",
    e="kv_cache.allocated",
    f="server.listening",
)
elsewhere = {event.name for event in run.events if event.proc.startswith("EngineCore")}
lab.compare(
    order="".join(sorted(SIX, key=lambda letter: ms[SIX[letter]])),
    in_another_process="".join(x for x in SIX if SIX[x] in elsewhere),
)

# %% [markdown]
# The engine process is started before the web framework is imported; that is why `build_app` imports FastAPI inside the function. For a small model the
# longest part is neither weights nor KV cache: it is importing torch. (On a CPU the engine then records decode steps, to replay them without Python between the calls of
# its kernels: [`NativeGraphHook`](../stage03_engine/core/features/cuda_graphs/native_graphs.py). With a GPU these are CUDA graphs. `--enforce-eager` leaves it out.)

# %% [markdown]
# ## Why the port comes first
#
# Until HTTP is up a bound port refuses connections, and from then on until the model is loaded each request gets a 503: nobody is served too early. But a second server on
# that port learns it at once, not after having loaded a model.

# %%
with lab.serve() as server:
    port = server.url.rpartition(":")[2]
    begin = time.perf_counter()
    second = subprocess.run(
        [sys.executable, "-m", "stage01_cli", "serve", "gpt2-tiny", "--host", "127.0.0.1", "--port", port],
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - begin
print(second.stderr.strip().replace(port, "PORT"))
print(
    f"exit code {second.returncode}, after {seconds * 1000:.0f} ms; a server is ready after {ms['server.listening']:.0f} ms"
)

# %% [markdown]
# ## Application, routes, state
#
# `build_app` makes an application that knows no model: its middleware and the routes below. `init_app_state` puts the services and the handlers where
# the routes look for them, and installs the features that the model and the flags ask for. That these are two things is what lets the application be built
# while the engine loads.

# %% tags=["today"]
from stage02_server.cli_args import FrontendArgs

app = api_server.build_app(FrontendArgs())
rows = []
for path, methods in app.openapi()["paths"].items():
    for method, about in methods.items():
        rows.append((method.upper(), path, about.get("description", "").partition("\n")[0]))
lab.table(rows, "", "path", "what it does")

# %% tags=["today"]
from prometheus_client import CollectorRegistry

from stage02_server.features.echo_engine.echo_engine import EchoCoreClient
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.frontend.async_llm import AsyncLLM

config = EngineArgs.from_kwargs(model="gpt2-tiny")
engine = AsyncLLM.from_vllm_config(config, client=EchoCoreClient(config), stat_loggers=[])
before = set(app.state._state)
api_server.init_app_state(engine, app, FrontendArgs(), CollectorRegistry())
lab.table(
    [(name, type(value).__name__) for name, value in app.state._state.items() if name not in before],
    "app.state",
    "class",
)

# %% [markdown]
# ## One request, without a socket
#
# An application is a function of a request (ASGI). It can be called in this very process; the engine behind it is the echo engine, which needs no torch
# (`--engine echo`).

# %%
import json

await engine.start()
body = json.dumps({"prompt": "To be", "max_tokens": 4, "temperature": 0}).encode()
scope = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "headers": [(b"content-type", b"application/json")],
}
scope |= {
    "query_string": b"",
    "http_version": "1.1",
    "scheme": "http",
    "server": ("here", 80),
    "client": ("here", 1),
    "root_path": "",
}
messages = [{"type": "http.request", "body": body, "more_body": False}]
sent = []


async def receive():
    if messages:
        return messages.pop()
    import asyncio

    await asyncio.Event().wait()  # the client stays


async def send(message):
    sent.append(message)


await app(scope, receive, send)
engine.shutdown()
print([message["type"] for message in sent], sent[0]["status"])
print(json.loads(sent[1]["body"])["choices"][0])

# %% [markdown] tags=["exercise"]
# ## Exercise: the socket
#
# Write `bind(host, port)` for IPv4. It returns a TCP socket that is bound and does not listen yet:
#
# - port 0 takes a free port; host `""` means all interfaces;
# - first without SO_REUSEADDR, and only if that fails with it (a port on which connections have just ended needs it; but two sockets that both have it
#   may share a port until one listens, and the loser would learn that after loading a model);
# - if the port is taken, raise StagesError(f"port {port} is taken; choose another one with --port, or --port 0 for any that is free");
# - if this machine has no such address, raise StagesError(f"this machine has no address {host!r}; see --host").
#
# The real part is [`create_server_socket`](../stage02_server/api_server.py).

# %% tags=["exercise"]
import socket

from stage03_engine.errors import StagesError


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket that is bound, and does not listen yet. Raises StagesError."""
    raise NotImplementedError


# %% tags=["check"]
import errno

from stage02_server.api_server import create_server_socket


def facts(make, host, port_is):
    """What a socket is like that `make` gives for a port that is free, listened on, or bound by another."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        if port_is == "listened on":
            other.listen()
        elif port_is == "free":
            other.close()
            port = 0
        try:
            with make(host, port) as made, socket.socket() as client:
                connects = client.connect_ex(("127.0.0.1", made.getsockname()[1]))
                reuse = made.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) != 0
                kind = made.type == socket.SOCK_STREAM and made.family == socket.AF_INET
                return kind, made.getsockname()[0], made.getsockname()[1] > 0, connects == errno.ECONNREFUSED, reuse
        except StagesError as error:
            return type(error).__name__, str(error).replace(str(port), "PORT")


hosts = ["127.0.0.1", "", "0.0.0.0", "localhost", "203.0.113.1"]
cases = [(host, port_is) for host in hosts for port_is in ("free", "bound", "listened on")]
passed = lab.check(lambda *case: facts(bind, *case), lambda *case: facts(create_server_socket, *case), cases)
