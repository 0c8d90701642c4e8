# %% [markdown]
# # 02 serve
#
# *Before: [01](01_cli.ipynb) · about 35 minutes with the exercise*
#
# **Question.** `stages serve` has a positional model, a flag `--model`, an environment variable and a config file. Which model is served, where are
# its files found, and which processes will run?
#
# | part | here | vLLM |
# |---|---|---|
# | the subcommand | [`ServeSubcommand.cmd`](../stage02_server/serve.py) | `entrypoints/cli/serve.py` ServeSubcommand.cmd |
# | model tag | [`resolve_cli`](../stage03_engine/args/resolve.py) | the same file: `args.model = args.model_tag` |
# | where the files are | [`resolve_model`](../stage03_engine/model_path.py) | `transformers_utils/config.py`, `repo_utils.py` |
# | decision tree | [`decide`](../stage02_server/serve.py) | `entrypoints/cli/serve.py`: run_headless, run_multi_api_server, run_server |

# %%
import argparse
import itertools

import lab

from stage02_server.serve import ServeSubcommand, decide
from stage03_engine.errors import StagesError

lab.source(ServeSubcommand.cmd)

# %% [markdown]
# ## Which model
#
# Three of the [five descriptions](MAP.md) (*Code Flow Trace*, *Executive Summary*, *Component Initialization*) serve with `vllm serve --model gpt2`; the positional form `vllm serve gpt2`
# is the one that the command's help shows. Here both work.

# %% [markdown] tags=["predict"]
# > **Predict.** What is served, or what is the error?
# > 1. `serve gpt2-tiny`
# > 2. `serve gpt2-tiny --model gpt2-tiny`
# > 3. `serve gpt2-tiny --model gpt2`
# > 4. `serve`, with `STAGES_MODEL=gpt-2`
# > 5. `serve gpt2-tiny`, with `STAGES_MODEL=gpt2`
# > 6. `serve`, and nothing else

# %% tags=["predict"]
lab.predict(served=None)  # a list of six: the name of a model, or "error"

# %% tags=["today"]
from stage03_engine.arg_utils import engine_settings
from stage03_engine.args.resolve import resolve_cli


def choose(tag=None, flag=None, variable=None):
    """(model, origin): what `resolve_cli` makes of a positional tag, --model and STAGES_MODEL."""
    given = argparse.Namespace(model_tag=tag, **({} if flag is None else {"model": flag}))
    found = resolve_cli(engine_settings(), given, {} if variable is None else {"STAGES_MODEL": variable})["model"]
    return found.value, found.origin


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except StagesError as error:
        return type(error).__name__, str(error)


cases = [
    ("gpt2-tiny",),
    ("gpt2-tiny", "gpt2-tiny"),
    ("gpt2-tiny", "gpt2"),
    (None, None, "gpt-2"),
    ("gpt2-tiny", None, "gpt2"),
    (),
]
lab.table(
    [(number, *outcome(choose, *one)) for number, one in enumerate(cases, start=1)],
    "",
    "model or error",
    "origin or message",
)
lab.claim("the tag and the flag alone give the same model", choose("gpt2")[0] == choose(None, "gpt2")[0] == "gpt2")
results = [outcome(choose, *one) for one in cases]
lab.compare(served=["error" if "Error" in model else model.replace("gpt-2", "gpt2") for model, _ in results])

# %% [markdown]
# ## Where its files are
#
# In this order: a folder, the bundled models, the Hugging Face cache, the hub. `gpt-2` means `gpt2`, since everybody writes it that way. With
# `--load-format dummy` a known shape is enough, and the hub is not asked. (This notebook works offline: `HF_HUB_OFFLINE=1`.)

# %% tags=["today"]
import os
import textwrap

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = str(lab.new_folder())  # an empty cache, so that everybody sees the same
from stage03_engine.model_path import resolve_model

tries = [("gpt2-tiny", "auto"), ("gpt-2", "dummy"), ("gpt2-xl", "dummy"), ("gpt2", "auto"), ("gpt2-tinny", "auto")]
rows, errors = [], []
for name, load_format in tries:
    try:
        files = resolve_model(name, load_format)
        rows.append((name, load_format, files.where, files.name, files.shape.num_layers, files.shape.hidden_size))
    except StagesError as error:
        errors.append((name, str(error)))
lab.table(rows, "name", "load format", "found in", "model", "layers", "width")
for name, message in errors:
    print(f"\n{name}:", textwrap.fill(message, 100, subsequent_indent="  "))

# %% [markdown]
# ## Which processes
#
# Two settings decide: `--headless` and `--api-server-count`.

# %% [markdown] tags=["predict"]
# > **Predict.** How many processes does a plain `serve` run, and in which of them is the HTTP server? What do `--headless` and
# > `--api-server-count 2` change?

# %% tags=["predict"]
lab.predict(processes_of_a_plain_serve=None)

# %% tags=["today"]
from stagetrace import read_run


def branch(headless, count):
    """The branch that `decide` takes, from its own trace event."""
    with lab.record() as folder:
        decide(headless, count)
    (event,) = read_run(folder).named("serve.decision")
    return event.args["branch"]


grid = list(itertools.product([False, True], [0, 1, 2, 4]))
lab.table([(h, n, branch(h, n)) for h, n in grid], "headless", "api_server_count", "branch")
recorded = read_run(lab.RECORDED / "one_request").events
lab.compare(processes_of_a_plain_serve=len({event.pid for event in recorded}))

# %% [markdown]
# The three branches are vLLM's. With `run_server` the process of the command becomes the API server, and it starts one engine process. With
# `run_multi_api_server` it becomes [the launcher](../stage02_server/features/api_servers/README.md) of several API servers in front of one engine. With
# `run_headless` it is no API server at all: it [works for one on another machine](../stage03_engine/frontend/features/data_parallel/nodes/README.md).
#
# So a plain `serve` is two processes. `serve` does not fork the API server: the process that parsed the command line goes on as the API server, with the
# same pid. The recording of a real run says so: `cli.main` and `server.listening` have one pid.

# %%
run = read_run(lab.RECORDED / "one_request")
wanted = (
    "cli.main",
    "cli.dispatch",
    "serve.model_tag",
    "serve.decision",
    "server.listening",
    "engine.spawned",
    "engine.busy_loop",
)
lab.table(
    [(e.phase, e.name, e.proc, e.pid) for e in run.events if e.name in wanted], "phase", "event", "process", "pid"
)
lab.claim(
    "cli.main and server.listening have one pid, engine.busy_loop has another",
    run.named("cli.main")[0].pid == run.named("server.listening")[0].pid != run.named("engine.busy_loop")[0].pid,
)

# %% [markdown]
# ## The whole decision on one page
#
# `--dry-run` stops here: every setting, its value, and where it comes from. Below is what came neither from a default nor from the
# model's folder, and the memory that the server would take.

# %%
import subprocess
import sys

command = [sys.executable, "-m", "stage01_cli", "serve", "gpt2-tiny", "--max-num-seqs", "8", "--dry-run"]
for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
    if line.startswith("  ") and not line.endswith(("  default", "(config.json)", "  detected")):
        print(line)

# %% [markdown] tags=["exercise"]
# ## Exercise: the decisions of serve
#
# Write `launch(tag, flag, variable, headless, count)`. Each of the first three is a model name or None: the positional tag, `--model`, `STAGES_MODEL`.
# Return (model, branch):
#
# - a tag and a flag that differ: raise ConfigError(f"two models: {tag!r} and --model {flag!r}; give one of them"), before anything else;
# - the model is the tag, else the flag, else the variable (an empty one counts as not set), else the default `gpt2-tiny`;
# - the branch is `run_headless` when headless, or when count is below 1; else `run_multi_api_server` when count is above 1; else `run_server`.
#
# The real parts are [`resolve_cli`](../stage03_engine/args/resolve.py) and [`decide`](../stage02_server/serve.py).


# %% tags=["exercise"]
def launch(tag: str | None, flag: str | None, variable: str | None, headless: bool, count: int) -> tuple[str, str]:
    """(model, branch). Raises stage03_engine.errors.ConfigError for a tag and a flag that differ."""
    raise NotImplementedError


# %% tags=["check"]
REAL_BRANCH = {(h, n): branch(h, n) for h in (False, True) for n in range(-1, 5)}
names = [None, "gpt2", "gpt2-tiny"]
cases = itertools.product(names, names, [*names, ""], [False, True], range(-1, 5))
passed = lab.check(launch, lambda t, f, v, h, n: (choose(t, f, v)[0], REAL_BRANCH[h, n]), cases)
