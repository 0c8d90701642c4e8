# %% [markdown]
# # 19 The life of a server: start, readiness, draining, death
#
# *Before: [03](03_api_server.ipynb), [05](05_engine_core.ipynb) · about 45 minutes with the exercise*
#
# **Question.** A new version is rolled out: the old server gets a SIGTERM while people are reading its streams, and the new one has no model in memory yet. What does each client see, and what
# must a load balancer ask so that nobody sees an error?
#
# You will look at a server before it can answer, send it away while two streams run, lose your patience, start the next one on the same port, and kill its engine.
#
# | part | here | vLLM |
# |---|---|---|
# | the states | [`ServerState`](../stage02_server/lifecycle.py), [`Lifecycle`](../stage02_server/lifecycle.py) | `/health`: 200, or 503 when the engine is dead |
# | serve until the end | [`serve_http`](../stage02_server/launcher.py) | `entrypoints/launchers/launcher.py` serve_http |
# | who still runs | [`RequestGate`](../stage02_server/middleware.py) | uvicorn's own waiting; `--shutdown-timeout` |
# | the socket | [`create_server_socket`](../stage02_server/api_server.py) | `entrypoints/openai/api_server.py` create_server_socket |
# | an engine that stands still | [`EngineStall`](../stage02_server/features/admin/engine_stall.py) | none |

# %%
import os
import signal

import lab

from stagetrace import read_run

FLAGS = ("--num-threads", "1", "--shutdown-timeout", "100", "--engine-stall-seconds", "2")


class Early(lab.Server):
    """A server to which questions are put as soon as HTTP is up, while the model still loads."""

    def _wait_until_ready(self):
        while "HTTP is up at " not in (line := self.process.stderr.readline()):
            self.log.append(line.rstrip())
            assert self.process.poll() is None or line, self.log
        self.url = line.split("HTTP is up at ")[1].split()[0]
        self.early = [self.ask(path) for path in ("/health", "/v1/models", "/version")]
        return super()._wait_until_ready()


def stream(max_tokens, prompt="ROMEO:"):
    """A stream of so many tokens, as it comes: the lines of its events."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return server.stream("/v1/completions", body)


def health():
    """(status, state) of /health."""
    status, body = server.ask("/health")
    return status, "ready" if status == 200 else body["state"]


def wait_for(state):
    """Ask /health until it says so."""
    while (answer := health())[1] != state:
        pass
    return answer


# %% [markdown]
# ## Before the model is there
#
# The socket is bound before the engine starts, and HTTP is up while the model loads. So a load balancer gets an answer, and whoever chose a port that is taken hears it at once and not after the
# model has been loaded.

# %% [markdown] tags=["predict"]
# > **Predict.** The model is still loading. What do `GET /health` and `GET /version` answer: a status each, or is the connection refused?

# %% tags=["predict"]
lab.predict(health_while_loading=None, version_while_loading=None)  # a status, or "refused"

# %%
server = Early(*FLAGS)
for path, (status, body) in zip(("/health", "/v1/models", "/version"), server.early):
    print(f"{path:12} {status}  {str(body)[:90]}")
print("later:      ", health())
lab.compare(health_while_loading=server.early[0][0], version_while_loading=server.early[2][0])

# %% [markdown]
# These are two questions, and a balancer must not mix them up:
#
# - **Liveness**: is it worth waiting for this process, or must somebody start it again? `/version` answers as long as HTTP works.
# - **Readiness**: should a new request go there? `/health` says 200 only then.
#
# A probe for liveness that asks `/health` ends each server whose model takes longer to load than the probe is patient. Kubernetes then starts it again, and it loads again: for ever. (A `startupProbe` is the usual cure: until it succeeds the others do not run.)
#
# ## SIGTERM
#
# Two streams run: a short one, and one of 400 tokens. Then somebody deploys a new version.

# %% [markdown] tags=["predict"]
# > **Predict.** After SIGTERM: how many of the two streams finish, if we wait? What is the status of a new request meanwhile? A second SIGTERM follows when the short stream has ended. With
# > which exit code does the server end?

# %% tags=["predict"]
lab.predict(new_request=None, exit_code_after_two_signals=None)

# %%
short, long = stream(12), stream(400)
next(short), next(long)  # both run
server.process.send_signal(signal.SIGTERM)
seen = wait_for("draining")
status, refusal = server.ask("/v1/completions", {"prompt": "To be", "max_tokens": 1})
whole = list(short)
print("/health:", *seen)
print("a new request:", status, refusal["error"]["message"])
print("the short stream ends with:", *whole[-1:])
still = health()
server.process.send_signal(signal.SIGTERM)  # we have waited long enough
cut = list(long)
exit_code = server.process.wait(lab.PATIENCE)
print("the long stream ends with: ", *[line[:130] for line in cut[-2:]])
print("exit code:", exit_code)
lab.claim("who runs may finish", whole[-1] == "data: [DONE]" and still == (503, "draining"))
lab.claim("who is cut hears an error, and not just silence", '"error"' in "".join(cut[-2:]) and len(cut) < 400)
lab.compare(new_request=status, exit_code_after_two_signals=exit_code)

# %% [markdown]
# An error in the stream matters: without one a client cannot tell a text that is cut from one that is complete. And exit code 0 after a signal tells the supervisor that this was no accident.
#
# Two numbers must fit together: `--shutdown-timeout` (how long running requests get) and the supervisor's own patience (`terminationGracePeriodSeconds` in Kubernetes, `TimeoutStopSec` in systemd), which ends in
# `kill -9`. The second has to be the longer one. Requests that the balancer sends before it notices get a 503, and nothing was done for them: they can safely be sent elsewhere.
#
# ## Again on the same port, at once
#
# TCP remembers the last connections of a port for a minute (TIME_WAIT). A server that binds without `SO_REUSEADDR` would have to wait for that.

# %%
from stage02_server.api_server import create_server_socket
from stage03_engine.errors import StagesError

old, port = server, server.url.rpartition(":")[2]
server = Early(*FLAGS, "--port", port)
print(server.url.replace(port, "the same port"), *health())
try:
    create_server_socket("127.0.0.1", int(port))
except StagesError as error:
    taken = str(error)
print("a second one:", taken.replace(port, "N"))
lab.claim("it serves on the same port", server.url == old.url and health() == (200, "ready"))
lab.claim("and who asks for a port that is taken is told so", "is taken" in taken)

# %% [markdown]
# ## An engine that stands still
#
# The engine's process is there, and does nothing: a driver hangs, or a debugger has stopped it. We stop it with SIGSTOP while a stream runs.

# %%
events = server.watch("/v1/engine/events")
engine = next(events)["pid"]
events.close()
running = stream(60)
next(running)
os.kill(engine, signal.SIGSTOP)
print("stopped:  ", *wait_for("stalled"))
os.kill(engine, signal.SIGCONT)
print("goes on:  ", *wait_for("ready"))
text = list(running)
lab.claim("nobody was thrown out: the stream is complete", text[-1] == "data: [DONE]")

# %% [markdown]
# Here it takes 2 seconds to notice (`--engine-stall-seconds`; 300 by default, because the first step may compile kernels). An engine without work owes nothing, however long it is silent. This state is
# not in vLLM: its `/health` asks only whether the engine's process is dead. (vLLM has another one, an engine that sleeps: with [`--enable-sleep-mode`](../stage03_engine/core/features/sleep/README.md) it gives its memory back and keeps its process.)
#
# ## An engine that dies

# %% [markdown] tags=["predict"]
# > **Predict.** Now `kill -9`, while a stream runs. What does its client see: the stream just ends, it waits until its own timeout, or it gets an error? And does the server go on without an engine?

# %% tags=["predict"]
lab.predict(stream_of_a_dead_engine=None, exit_code_after_death=None)  # "ends", "waits" or "error"; a number

# %%
running = stream(400)
next(running)
os.kill(engine, signal.SIGKILL)
last = list(running)
seen = health()
exit_code = server.process.wait(lab.PATIENCE)
print("the stream:", last[-2][:150] if len(last) > 1 else last[-1][:150])
print("/health:   ", *seen, "\nexit code: ", exit_code)
lab.claim("/health says so, until the server ends", seen == (503, "failed"))
got_error = '"error"' in "".join(last[-2:])
lab.compare(stream_of_a_dead_engine="error" if got_error else "ends", exit_code_after_death=exit_code)

# %% [markdown]
# The server stays for 2 seconds more, so that a balancer which asks every second sees `failed` and sends nothing else, and then ends with exit code 1, so that somebody starts it again. With several engines it
# would go on with the others ([13](13_more_than_one.ipynb)).
#
# ## Both lives, from the recordings

# %%
lives = [read_run(one.folder) for one in (old, server)]
for number, run in enumerate(lives, 1):
    states = run.named("server.state")
    first = run.named("cli.main")[0].ts
    print(f"life {number}:", *[f"{(e.ts - first) / 1e9:.2f} s {e.args['state']}," for e in states])
at = {event.name: event.ts for event in reversed(lives[0].events)}  # where each stands first
order = ["server.socket_bound", "engine.spawned", "server.app_built", "engine.ready", "server.listening"]
lab.table([(name, f"{(at[name] - at['server.socket_bound']) / 1e6:,.0f} ms") for name in order], "", "after the socket")
states = [[event.args["state"] for event in run.named("server.state")] for run in lives]
lab.claim("the first life was orderly", states[0] == ["starting", "ready", "draining", "stopped"])
lab.claim("the second one was not", states[1][-1] == "failed" and "stalled" not in states[0])

# %% [markdown]
# > **What is often said**, and in which of the [five descriptions](MAP.md)
# >
# > - *"Slow first request: model loading not complete"* (*Executive Summary*, common issues). A request that comes too early is not slow: it gets a 503 at once.
# > - *"Port already in use: use `--port` or stop the other service"* (*Executive Summary*, common issues). Right, and it is said before anything is loaded: the socket is the first thing that a start needs.
# > - *The engine's process raises SystemExit at SIGTERM* (*Component Initialization*, background process). Then a request that runs would be lost. Here the signal is the front end's: the engine goes on computing, and ends when it is told
# >   to.
# > - *Draining: "finishing in-flight requests"* and then *Stopped* (*Executive Summary*, lifecycle states). Only within `--shutdown-timeout`, and until the second signal. And there are two states more: stalled and failed.

# %%
lab.claim("too early: 503", server.early[1][0] == 503)
lab.claim("the socket before the engine", at["server.socket_bound"] < at["engine.spawned"] < at["engine.ready"])
tokens = [event.ts for event in lives[0].named("sched.token")]
lab.claim("tokens were computed after the signal", max(tokens) > at["server.draining"])
lab.claim("the long stream did not finish, in either life", len(cut) < 400 and len(last) < 400)

# %% [markdown] tags=["exercise"]
# ## Exercise: what the server says of itself
#
# **Contract.** `probe(ready, errored, draining, ended, path)`: the first three say whether the engine has told that it is ready, whether it has died (or could not start), and whether a signal has come.
# `ended` is None while the server runs, else how it ended: "stopped" or "failed". Return (state, whether a request to `path` is refused because of the state).
#
# - Several things may be true at once. The end counts before the engine's death, that before a signal, and that before the start.
# - `/health`, `/metrics`, `/version` and `/load` are never refused.
# - In `ready` nothing is refused. In `failed` neither: each route says for itself what it cannot do.
#
# The real part is [`Lifecycle`](../stage02_server/lifecycle.py).


# %% tags=["exercise"]
def probe(ready: bool, errored: bool, draining: bool, ended: str | None, path: str) -> tuple[str, bool]:
    """The state of the server, and whether it refuses a request to this path because of it."""
    raise NotImplementedError


# %% tags=["check"]
from itertools import product
from types import SimpleNamespace

from stage02_server.lifecycle import Lifecycle


def real_probe(ready, errored, draining, ended, path):
    """What the real part says."""
    engine = SimpleNamespace(ready=ready or None, errored=errored)
    lifecycle = Lifecycle(engine, SimpleNamespace(draining=draining))
    if ended is not None:
        lifecycle.end(failed=ended == "failed")
    return lifecycle.state.value, lifecycle.refusal(path) is not None


cases = product((False, True), (False, True), (False, True), (None, "stopped", "failed"), ("/health", "/v1/models"))
passed = lab.check(probe, real_probe, cases)
