# %% [markdown]
# # 21 Security: attack the server
#
# *Before: [06](06_request.ipynb), [07](07_into_the_engine.ipynb) · about 60 minutes with the exercise*
#
# **Question.** A model server runs for hours on the most expensive machine in the house, takes programs from strangers (grammars, templates, regular expressions), and shares one cache among all of them. What can a client
# learn, break or hold up, and what stops it?
#
# You attack a server of your own in eight ways. Behind most of them stands a published vulnerability of vLLM. They are named because they show which mistakes good engineers make here; all are fixed by now, or were
# in parts that are gone.
#
# | part | here | vLLM |
# |---|---|---|
# | who may ask | [`AuthenticationMiddleware`](../stage02_server/features/hardening/authentication.py) | `entrypoints/serve/middleware/authenticate.py` |
# | keys are tenants | [`Tenants`](../stage02_server/features/hardening/tenants.py) | all keys are one tenant; `cache_salt` |
# | messages, and no pickle | [`EngineCoreRequest`](../stage03_engine/messages.py) | `v1/serial_utils.py` MsgpackDecoder |
# | headers and bodies | [`LimitedHttpProtocol`](../stage02_server/features/hardening/connection_limits.py) | `entrypoints/launchers/utils/constants.py`, `entrypoints/launchers/launcher.py` |
# | slow clients | [`slow_clients.py`](../stage02_server/features/hardening/slow_clients.py) | none |
# | grammars and templates | [`GrammarChecker`](../stage03_engine/core/features/structured_output/grammar_checker.py), [`jinja.py`](../stage02_server/features/chat_template/jinja.py) | `v1/structured_output/__init__.py`, `renderers/` |
# | all limits | [LIMITS.md](../stage02_server/features/hardening/LIMITS.md) | |

# %%
import ast
import os
import pickle
import random
import re
import socket
import stat
import string
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import lab
import msgspec
import psutil
import zmq

from stagetrace import read_run

ALICE, BOB = "sk-alice-0123456789", "sk-bob-9876543210"
os.environ["STAGES_API_KEY"] = (
    f'["{ALICE}", "{BOB}"]'  # not on the command line, which every user of the machine can read
)
server = lab.Server(
    "--num-threads", "1", "--enable-prompt-tokens-details", "--trust-request-chat-template", "--grammar-compile-seconds", "1",
    "--request-header-timeout", "1",
)  # fmt: skip
address = urlsplit(server.url).hostname, urlsplit(server.url).port


def ask(path, body=None, key=ALICE, **headers):
    """(status, JSON), with this key."""
    return server.ask(path, body, **({"Authorization": f"Bearer {key}"} if key else {}), **headers)


def complete(prompt, key=ALICE, **fields):
    """A completion of one token."""
    return ask("/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0} | fields, key)


def send_raw(data):
    """What the server answers to these bytes."""
    with socket.create_connection(address) as connection:
        connection.sendall(data)
        return connection.recv(4096).decode("latin-1")


def alive():
    """Is another client served, as if nothing had happened?"""
    return server.ask("/health")[0] == 200 and complete("To be", BOB)[0] == 200


# %% [markdown]
# ## What is exposed
#
# One port, and what lies behind it without a key:

# %%
paths = [
    "/health",
    "/metrics",
    "/version",
    "/v1/models",
    "/v1/completions",
    "/tokenize",
    "/server_info",
    "/no-such-route",
]
without = {path: server._open(path, None, {}).status for path in paths}
print("without a key:", without)
listening = [c.laddr for c in psutil.Process(server.process.pid).net_connections("inet") if c.status == "LISTEN"]
children = psutil.Process(server.process.pid).children(recursive=True)
more = [c.laddr for child in children for c in child.net_connections("inet") if c.status == "LISTEN"]
print("listening:", len(listening), "socket of the server,", len(more), "of its", len(children), "child processes")
lab.claim("one port listens", len(listening) == 1 and not more)
lab.claim("a route that nobody has thought of is closed too", without["/no-such-route"] == 401)
lab.claim("a wrong key is no key", ask("/v1/models", key=ALICE[:-1] + "x")[0] == 401)

# %% [markdown]
# The list says what is *open*, and all else is closed: so a route that somebody adds later is not left open by oversight. And a key is compared as a digest, in constant time
# ([`AuthenticationMiddleware`](../stage02_server/features/hardening/authentication.py)). vLLM compared strings with `==` until 0.11.0 (CVE-2025-59425): how long that takes tells how much of a guess is right.
#
# ## 1. Did somebody ask this before?
#
# The prefix cache makes a prompt fast whose beginning somebody has sent before. So a client can try texts, and the fast one is another client's (CVE-2025-46570, vLLM before 0.9.0). Here the server even tells how many tokens it has
# found (`cached_tokens`), which spares us the stopwatch.

# %% [markdown] tags=["predict"]
# > **Predict.** Alice sends a secret prompt of 48 tokens, and then sends it again. Then Bob, who guesses it right, sends it with his own key. How many cached tokens does each of the three answers tell? (A block has 16.)

# %% tags=["predict"]
lab.predict(alice_again=None, bob_guesses=None)

# %%
SECRET = [7] * 48


def cached(key, **fields):
    """How many tokens of the prompt were in the cache."""
    return complete(SECRET, key, **fields)[1]["usage"]["prompt_tokens_details"]["cached_tokens"]


rows = [
    ("Alice", cached(ALICE)),
    ("Alice again", cached(ALICE)),
    ("Bob guesses it", cached(BOB)),
    ("Bob again", cached(BOB)),
]
rows.append(("Alice, with a cache_salt", cached(ALICE, cache_salt="team 7")))
rows.append(("again with this salt", cached(ALICE, cache_salt="team 7")))
lab.table(rows, "who", "cached tokens")
found = dict(rows)
lab.claim("Bob finds only what is his own", found["Bob guesses it"] == 0 < found["Bob again"])
lab.claim(
    "a salt separates the users of one key", found["Alice, with a cache_salt"] == 0 < found["again with this salt"]
)
lab.compare(alice_again=found["Alice again"], bob_guesses=found["Bob guesses it"])

# %% [markdown]
# The salt is part of the first block's hash, and so of all that follow ([04 block pool](exercises/ex04_block_pool/README.md)). Each key has a random salt of its own; a gateway with one key for many users sends `cache_salt` with each request. The hash itself matters, too: vLLM's
# was Python's `hash()`, which somebody can make collide (CVE-2025-25183); then Bob would get an answer to Alice's prompt.
#
# ## 2. A program on a socket
#
# The processes talk through ZMQ. Several of vLLM's worst vulnerabilities were a `pickle` on a socket that others could reach or answer for (CVE-2025-32444 and CVE-2025-30165 on ZMQ, CVE-2025-47277 on torch's store): to unpickle is to run
# what the sender wants.


# %%
class Burglar:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return (Path.touch, (Path(loot),))


loot = os.path.join(tempfile.mkdtemp(), "was-here")
letter = pickle.dumps(Burglar())
pickle.loads(letter)
print("pickle.loads ran a stranger's program:", os.path.exists(loot))
os.remove(loot)
ours = {c.laddr for c in psutil.Process(server.process.pid).net_connections("unix") if str(c.laddr).startswith("/")}
doors = {Path(path).name: path for path in ours}
folder = Path(doors["output"]).parent
print("sockets:", *sorted(doors), "in a folder with the rights", stat.filemode(folder.stat().st_mode))
context = zmq.Context()
push = context.socket(zmq.PUSH)
push.connect(f"ipc://{doors['output']}")
push.send_multipart([letter])
push.send_multipart([b"\x00", letter])
lab.claim("no other user of the machine can reach the sockets", stat.S_IMODE(folder.stat().st_mode) == 0o700)
lab.claim("two letters came, and the server goes on", alive())
lab.claim("nothing of them was run", not os.path.exists(loot))
context.destroy(linger=0)


# %%
def imports_pickle(path):
    """Does this file import pickle, or something that unpickles?"""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = [a.name for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names]
    return {"pickle", "cloudpickle", "dill", "shelve", "marshal"} & set(names)


stages = [path for stage in sorted(lab.ROOT.glob("stage0[1-4]_*")) for path in stage.rglob("*.py")]
found = [str(path.relative_to(lab.ROOT)) for path in stages if imports_pickle(path)]
print(f"{len(stages)} files of the stages, of which import one of these: {found}")
from stage03_engine import messages

try:
    messages.decode_add(letter)
except msgspec.DecodeError as error:
    print("a decoder of messages says:", error)

# %% [markdown]
# A decoder that knows the types it expects can only build these. The same is true of files: weights are read as safetensors, because `torch.load` is a pickle, too (CVE-2025-24357); and where prompts came as tensors, even `weights_only=True` was not enough (CVE-2025-62164: a sparse one wrote out of
# bounds).
#
# ## 3. Bombs: small to send, large to unpack
#
# Each of these is about a hundred bytes or less. A regular expression, a schema or a template is a program, and its author chooses how long it runs (CVE-2025-61620; in CVE-2025-48887 the expression was vLLM's own, and the text to search was
# not). An invalid one must not bring the server down (CVE-2025-48942, CVE-2025-48943).

# %% [markdown] tags=["predict"]
# > **Predict.** Four bombs: which of them are refused, and does the server serve others afterwards? Guess how many of the four get a status other than 400.

# %% tags=["predict"]
lab.predict(other_than_400=None)

# %%
chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
BOMBS = {
    "a regular expression that repeats repetitions": lambda: complete("x", guided_regex="(" * 7 + "a" + "{0,1000})" * 7),
    "a schema that counts by a large number": lambda: complete("x", guided_json={"type": "integer", "multipleOf": 123456789}),
    "a template that loops for ever": lambda: ask("/v1/chat/completions", chat | {"chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"}),
    "a template that looks for a way out": lambda: ask("/v1/chat/completions", chat | {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}),
}  # fmt: skip
rows = []
for name, attack in BOMBS.items():
    status, answer = attack()
    rows.append((name, status, answer["error"]["message"][:70] if status != 200 else "", alive()))
lab.table(rows, "bomb", "status", "message", "others served")
lab.claim("others are served after each", all(row[3] for row in rows))
lab.claim("no bomb is a 500", all(row[1] < 500 for row in rows))
lab.compare(other_than_400=sum(row[1] != 400 for row in rows))

# %% [markdown]
# The first one is answered: its compiler works lazily and counts its steps, so one token of it costs little. The others are refused. But refused is not enough: it matters *where* they run meanwhile. Grammars and templates run in processes of their own, with a limit of time and memory that the operating system enforces ([20](20_structured_output.ipynb)), and never on the event loop, which all clients share. And a template may not come
# with a request at all unless the operator says so (`--trust-request-chat-template`).
#
# ## 4. Fetch this for me
#
# A server that fetches URLs for its clients reaches what they cannot: cloud metadata, the database next door (SSRF; CVE-2025-6242, vLLM's loader of images). We listen, and ask the server to come.

# %%
trap = socket.create_server(("127.0.0.1", 0))
trap.setblocking(False)
url = f"http://127.0.0.1:{trap.getsockname()[1]}/latest/meta-data"
parts = [
    {"type": "image_url", "image_url": {"url": url}},
    {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
    {"type": "text", "text": "Hi", "image": url},
]
for part in parts:
    status, answer = ask("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
    print(status, part["type"], (answer["error"]["message"] if status != 200 else "")[:90])
try:
    trap.accept()
    came = True
except BlockingIOError:
    came = False
lab.claim("nobody came to our trap: nothing in a request makes the server fetch a URL", not came)

# %% [markdown]
# ## 5. A header without end, a body without end
#
# A header that is kept until it is complete is memory that a stranger fills (CVE-2025-48956: vLLM had no limit to a header).

# %%
start = b"GET /health HTTP/1.1\r\nHost: x\r\n"
big = send_raw(start + b"X-Big: " + b"a" * (5 << 20))[:60].splitlines()[0]
many = send_raw(start + b"".join(b"X-%d: y\r\n" % i for i in range(300)) + b"\r\n").splitlines()[0]
items = ask("/v1/completions", {"prompt": [1] * 400_000})
n_bomb = complete("x", n=100_000, temperature=1)
for what, got in (
    ("5 MiB of header", big),
    ("300 fields", many),
    ("400,000 items", items[0]),
    ("n = 100,000", n_bomb[0]),
):
    print(f"{what:16} {got}")
lab.claim("headers: 431", "431" in big and "431" in many)
lab.claim("a body: counted while it arrives, 413 before anything parses it", items[0] == 413)
lab.claim("and so many answers are a 400", n_bomb[0] == 400 and alive())

# %% [markdown]
# ## 6. Slowly: one byte, and another
#
# *Slowloris*: open many connections, never finish a request, and wait. Each costs the attacker nothing and the server a descriptor. We open 50 and send the beginning of a header. The limit is one second here (`--request-header-timeout`; 30 by default).

# %%
slow = [socket.create_connection(address) for _ in range(50)]
for connection in slow:
    connection.sendall(start + b"X-Slow: a")
during = alive()
ends = [
    connection.recv(200).decode("latin-1").partition("\r\n")[0] for connection in slow
]  # waits until the server has had enough
for connection in slow:
    connection.close()
print("the server says:", {end or "(closed)" for end in ends})
lab.claim("others are served meanwhile", during)
lab.claim("each of the 50 was sent away", len(ends) == 50 and not any("200" in end for end in ends))

# %% [markdown]
# ## 7. Write into the log
#
# Logs are read by people in terminals, and by programs. What a client sends must not begin a new line there, look like another client, or steer the terminal.

# %%
target = "/odd%0aINFO:%20all%20is%20well%1b[31m"
forged = f"GET {target} HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 6.6.6.6\r\nConnection: close\r\n\r\n"
print(send_raw(forged.encode("latin-1")).splitlines()[0])
while not (lines := [line.rstrip("\n") for line in server.log if "/odd" in line]):
    alive()
print("the log:", re.sub(r"pid=\d+|127\.0\.0\.1:\d+", "...", lines[0])[-90:])
lab.claim("one line, without a control character", len(lines) == 1 and lines[0].isprintable())
lab.claim("a client cannot claim to be 6.6.6.6", not any("6.6.6.6" in line for line in server.log))

# %% [markdown]
# ## 8. Where are the keys?

# %%
server.close()
text = "\n".join(server.log) + "".join(
    p.read_text(errors="replace") for p in sorted(server.folder.rglob("*")) if p.is_file()
)
print(f"{len(text):,} characters of log and recording")
lab.claim("no key is in the log or in the recording", ALICE not in text and BOB not in text)
lab.claim("nor is a prompt, unless one asks for it", "To be" not in text)
modes = {stat.filemode(p.stat().st_mode) for p in server.folder.rglob("*") if p.is_file()}
print("the recording's files:", *modes)
lab.claim("only its owner can read the recording", modes == {"-rw-------"})

# %% [markdown]
# ## 9. What remains
#
# Keys still share one engine: how long an answer takes says that there are others. `/metrics` needs no key, so that a monitor can read it; on a quiet server it tells how long somebody's request was. Close it in your reverse proxy.
# [The hardening room](../stage02_server/features/hardening/README.md) lists what the holders of different keys can learn about each other, and every attack that was tried, with the test that makes it.
#
# > **What is often said**, and in which of the [five descriptions](MAP.md)
# >
# > - *`--host 0.0.0.0`, `--api-key sk-xxxx`* (*Executive Summary*, options). A key on the command line is read by every user of the machine with `ps`. Put it in the environment.
# > - *`AuthenticationMiddleware`, "if API key provided"* (*Code Flow Trace*, application). It must be a list of what is open. vLLM's lists what is closed: what begins with `/v1` or a few other prefixes.
# > - *"Middleware: add authentication, logging, rate limiting"* (*Executive Summary*, extensions). Limits in a middleware come too late for headers: when it runs, the parser has kept them all.

# %%
run = read_run(server.folder)
argv = [event.args for event in run.named("cli.main")]
lab.claim("the command line held no key", ALICE not in str(argv) and "sk-" not in str(argv))
lab.claim("what is not on the list is closed, also outside /v1", without["/server_info"] == without["/tokenize"] == 401)
arrived = [event for event in run.named("http.received") if event.args.get("path") == "/health"]
print(len(arrived), "requests for /health came through")
lab.claim("a header that is too large is answered with 431 by the connection", "431" in big and "431" in many)

# %% [markdown] tags=["exercise"]
# ## Exercise: compare a key, escape a line
#
# **Contract.** Two functions in one: `guard(header, keys, target)` returns (number of the key or None, the target as a log may show it).
#
# - `header` is the value of `Authorization`, or None. It must be `Bearer KEY`; the word may be written in any case, and white space around the key does not count. `keys` is a list. Compare with *each* of them, with `hmac.compare_digest`
#   of their SHA-256 digests.
# - In the line, each character that is not printable (`str.isprintable`) stands as Python's escape for it, as `repr` writes it: `\n`, `\x1b`, `\u2028`. All other characters stand as they are.
#
# The real parts are [`AuthenticationMiddleware`](../stage02_server/features/hardening/authentication.py) and [`printable`](../trace/stagetrace/text.py).


# %% tags=["exercise"]
def guard(header: str | None, keys: list[str], target: str) -> tuple[int | None, str]:
    """Which of the keys the header holds, and the target without anything that steers a terminal."""
    raise NotImplementedError


# %% tags=["check"]
from stage02_server.features.hardening.authentication import AuthenticationMiddleware
from stage02_server.features.hardening.manifest import HardeningFlags
from stagetrace.text import printable

EVIL = "\n\r\x1b[2J\x9b\u2028\u202e é日"


def real_guard(header, keys, target):
    """What the real parts say."""
    middleware = AuthenticationMiddleware(None, HardeningFlags(api_key=tuple(keys)))
    headers = [] if header is None else [(b"authorization", header.encode("latin-1"))]
    found = middleware._keys_of({"type": "http", "headers": headers})
    return (found.pop() if found else None), printable(target)


def case(seed):
    rng = random.Random(seed)
    keys = rng.sample(["sk-a", "sk-b", "sk-ab", "sk-abc", "x"], 3)
    key = rng.choice([*keys, "sk-", "sk-abcd", ""])
    header = rng.choice([f"Bearer {key}", f"bearer {key}", f"BEARER   {key} ", f"Basic {key}", key, None])
    return header, keys, "/" + "".join(rng.choices(EVIL + string.ascii_letters, k=rng.randint(0, 5)))


passed = lab.check(guard, real_guard, map(case, range(200)))
