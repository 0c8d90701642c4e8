# %% [markdown]
# # 01 The command line
#
# *Before: [00](00_the_whole_walk.ipynb) · about 40 minutes with the exercise*
#
# **Question.** Between typing `stages serve gpt2-tiny` and the first line of the command's own code: what is imported, what is parsed,
# and who decides the value of each setting?
#
# | part | here | vLLM |
# |---|---|---|
# | entry, lazy subcommands | [`main`](../stage01_cli/main.py), [`COMMANDS`](../stage01_cli/main.py) | `entrypoints/cli/main.py` main, CMD_MODULES |
# | environment set-up | [`cli_env_setup`](../stage03_engine/args/command.py) | `entrypoints/common/startup.py` cli_env_setup |
# | parser | [`FlexibleArgumentParser`](../stage03_engine/args/parser.py) | `utils` FlexibleArgumentParser |
# | flags from dataclasses | [`settings_of`](../stage03_engine/args/fields.py), [`add_flags`](../stage03_engine/args/fields.py) | `engine/arg_utils.py` get_kwargs |
# | order of sources | [`resolve_settings`](../stage03_engine/args/resolve.py) | FlexibleArgumentParser (`--config`), `envs.py` |

# %%
import json
import os
import subprocess
import sys

import lab

# %% [markdown]
# ## What is imported
#
# A subcommand is a name and where its class is, as `module:Class`. The module is imported when the name was typed, not before.
# %% tags=["today"]
from stage01_cli.main import COMMANDS, make_parser

lab.source(make_parser)
lab.table([(name, *where.split(":")) for name, (where, _) in COMMANDS.items()], "command", "module", "class")

# %% [markdown] tags=["predict"]
# > **Predict.** Four command lines: `--help`, `serve --help`, `serve gpt2-tiny --dry-run` and `collect-env`. Which of them import
# > `torch`? Which import `fastapi`? `import torch` alone, for comparison: how many times as long as `--help`?

# %% tags=["predict"]
lab.predict(importing_torch=None, importing_fastapi=None, times_as_long=None)  # of the four command lines: how many

# %%
PROBE = """
import json, sys, time
words = sys.argv[1:]
sys.stdout = open("/dev/null", "w")
try:
    if words == ["import torch"]:
        import torch
    else:
        from stage01_cli.main import main
        main(words)
except SystemExit:
    pass
seconds, modules = time.process_time(), set(sys.modules)
import psutil
megabytes = psutil.Process().memory_info().rss // 2**20
heavy = [name for name in ("argparse", "msgspec", "zmq", "fastapi", "tokenizers", "transformers", "torch") if name in modules]
facts = [seconds, megabytes, len(modules), ", ".join(heavy)]
print(json.dumps(facts), file=sys.__stdout__)
"""


def probe(*words):
    return json.loads(
        subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True, check=True).stdout
    )


lines = [["--help"], ["serve", "--help"], ["serve", "gpt2-tiny", "--dry-run"], ["collect-env"], ["import torch"]]
measured = {" ".join(words): probe(*words) for words in lines}
lab.table(
    [(name, *facts) for name, facts in measured.items()], "command line", "CPU s", "MB", "modules", "of the large ones"
)
print(f"\nimport torch / --help: {measured['import torch'][0] / measured['--help'][0]:.0f} times the CPU time")
lab.claim(
    "no command line imports torch or fastapi",
    all(
        "torch" not in facts[3] and "fastapi" not in facts[3]
        for name, facts in measured.items()
        if name != "import torch"
    ),
)
ours = [facts[3].split(", ") for name, facts in measured.items() if name != "import torch"]
lab.compare(
    importing_torch=sum("torch" in heavy for heavy in ours),
    importing_fastapi=sum("fastapi" in heavy for heavy in ours),
    times_as_long=round(measured["import torch"][0] / measured["--help"][0]),
)

# %% [markdown]
# None of these imports torch, and none imports the web framework: `--dry-run` ends before the server begins. `collect-env` asks for versions by
# reading the installed packages' files, without importing them. And a server that runs? Which of its two processes has torch's library in its memory:

# %%
import psutil

with lab.serve() as server:
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children()]
    rows = []
    for name, process in zip(("the API server", "its engine"), processes, strict=True):
        libraries = {os.path.basename(each.path) for each in process.memory_maps()}
        rows.append((name, process.memory_info().rss // 2**20, any("libtorch" in name for name in libraries)))
lab.table(rows, "process", "MB", "has torch's library")
lab.claim("the API server has not, its engine has", [row[2] for row in rows] == [False, True])

# %% [markdown]
# ## What is parsed
#
# One field of a config dataclass is a flag, an environment variable and a key of the config file. Nothing is written twice.

# %% tags=["today"]
from stage03_engine.args.fields import settings_of
from stage03_engine.config import SchedulerConfig

rows = [(s.name, s.flag, s.variable, s.kind.__name__, s.default) for s in settings_of(SchedulerConfig)][:6]
lab.table(rows, "field of SchedulerConfig", "flag", "variable", "type", "default")

# %% [markdown]
# The parser takes underscores for dashes, and `2k` or `2K` for numbers. It refuses abbreviations, and says in one line what is wrong.

# %% tags=["today"]
from stage01_cli.main import make_parser
from stage03_engine.args.fields import parse_int
from stage03_engine.errors import ConfigError

parser = make_parser("serve")
args = parser.parse_args(["serve", "gpt2-tiny", "--max_num_seqs=8", "--max-num-batched-tokens", "2k"])
print(args.model_tag, args.max_num_seqs, args.max_num_batched_tokens)
print("2k, 2K:", parse_int("2k"), parse_int("2K"))
for words in (["--max-num-sequences", "8"], ["--max-num", "8"], ["--port", "http"], ["--block-size", "1.5K"]):
    try:
        parser.parse_args(["serve", *words])
    except ConfigError as error:
        print(f"{' '.join(words):25} -> {error}")

# %% [markdown]
# ## Who decides
#
# Each setting has one value and five places that could give it. Let three of them disagree about the port.

# %%
folder = lab.new_folder()
(folder / "config.yaml").write_text("port: 7003\nmax-num-seqs: 33\nblock-size: 8\n")


def dry_run(*flags, **environment):
    command = [sys.executable, "-m", "stage01_cli", "serve", "gpt2-tiny", "--dry-run", *flags]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


# %% [markdown] tags=["predict"]
# > **Predict.** `--port 7001`, `STAGES_PORT=7002`, `port: 7003` in the config file: which port? And `max_num_seqs`, with 32 in the
# > environment and 33 in the file? *Code Flow Trace* (configuration resolution order; [all five descriptions](MAP.md)) lets the environment win over the command line.

# %% tags=["predict"]
lab.predict(port=None, max_num_seqs=None)

# %%
shown = ("port", "max_num_seqs", "block_size", "dtype", "model", "host")
resolved = {}
for line in dry_run(
    "--port", "7001", "--config", str(folder / "config.yaml"), STAGES_PORT="7002", STAGES_MAX_NUM_SEQS="32"
):
    if line.split()[0] in shown:
        print(line.replace(str(folder), "FOLDER"))
        resolved[line.split()[0]] = line.split()[1]
lab.claim(
    "the command line wins over the environment, and that over the file",
    (resolved["port"], resolved["max_num_seqs"], resolved["block_size"]) == ("7001", "32", "8"),
)
lab.compare(port=int(resolved["port"]), max_num_seqs=int(resolved["max_num_seqs"]))

# %% [markdown]
# What is typed now is the most deliberate, so it wins: command line, environment, config file, default; `detected` fills what is still
# open (`auto` or none), here the dtype from the device. In vLLM too the command line wins over `--config`; its environment variables
# (`envs.py`) are for other things than the flags, so that the two never meet.

# %%
from stage03_engine.args.resolve import decide

lab.source(decide)

# %% [markdown]
# ## Dispatch, in the trace
#
# The events of phases 1 and 2. `trace.hold` keeps them in memory while the very command line that says whether to record is still being
# parsed; `trace.open` writes them.

# %%
from stagetrace import read_run

traces = lab.new_folder()
dry_run("--trace", str(traces))
for event in read_run(traces).events[1:]:
    print(event.console_line().replace(str(traces), "DIR"))

# %% [markdown] tags=["exercise"]
# ## Warm-up: who decides
#
# This is the warm-up. In exercise [1](exercises/ex01_settings/README.md) you write the real part, and it serves in the real server: `stages course start 1`.
#
# Write `resolve(settings, given, environ)`. `settings` is a list of [`Setting`](../stage03_engine/args/fields.py), `given` maps names to what the
# command line gave, `environ` maps variables to texts. Return a dictionary: name → (value, origin), where origin is
#
# - `command line (--the-flag)` when the name is in `given`;
# - else `environment (STAGES_THE_NAME)` when that variable is there and not empty;
# - else `default`.
#
# `setting.accept(value)` turns a value into the right type, and raises ValueError; raise
# ConfigError(f"{the flag}: {error}") or ConfigError(f"environment variable {the variable}: {error}") then. The real part is
# [`resolve_settings`](../stage03_engine/args/resolve.py), which also knows the config file.

# %% tags=["exercise"]
from stage03_engine.args.fields import Setting
from stage03_engine.errors import ConfigError


def resolve(
    settings: list[Setting], given: dict[str, object], environ: dict[str, str]
) -> dict[str, tuple[object, str]]:
    """name -> (value, origin). Of a `setting` you need its `name`, `flag`, `variable` and `default`, and `accept(value)`."""
    raise NotImplementedError


# %% tags=["check"]
import random

from stage03_engine.args.resolve import resolve_settings

ALL = settings_of(SchedulerConfig)


def real(settings, given, environ):
    return {name: (one.value, one.origin) for name, one in resolve_settings(settings, given, environ=environ).items()}


def case(seed):
    rng = random.Random(seed)
    values = {int: [8, "8", "2k", "", "x", True], bool: [True, "off", "", "maybe"], str: ["fcfs", "swap", "", 3]}
    settings = rng.sample(ALL, 4)
    given = {s.name: rng.choice(values.get(s.kind, [""])) for s in settings if rng.random() < 0.3}
    environ = {s.variable: str(rng.choice(values.get(s.kind, [""]))) for s in settings if rng.random() < 0.3}
    return settings, given, environ


passed = lab.check(resolve, real, map(case, range(500)))

# %% [markdown]
# That was the warm-up. Exercise 1 has the real part:

# %%
if passed:
    import stage01_cli.tools.course as course

    course.start(1, lab.WORK)  # copies the starter into work/; then course.check(1)
else:
    print("This begins exercise 1 once yours passes.")
