# %% [markdown]
# # 20 Structured output: a mask over the vocabulary
#
# *Before: [08](08_execution.ipynb), [10](10_scheduler_lab.ipynb) · about 55 minutes with the exercise*
#
# **Question.** A client asks for JSON that follows a schema, and gets it from a model that has read nothing but Shakespeare. Nobody asked the model to. How does a schema become a rule about tokens,
# who enforces it, and what does it cost the others?
#
# | part | here | vLLM |
# |---|---|---|
# | what a request may ask for | [`StructuredOutputsParams`](../stage03_engine/params/structured_outputs.py) | `sampling_params.py` StructuredOutputsParams |
# | schema, expression or choices to one grammar | [`to_lark`](../stage03_engine/core/features/structured_output/lark.py) | `v1/structured_output/backend_guidance.py` serialize_guidance_grammar |
# | a grammar and a vocabulary | [`Guidance`](../stage03_engine/core/features/structured_output/backend_guidance.py), [`Matcher`](../stage03_engine/core/features/structured_output/backend_guidance.py) | `v1/structured_output/backend_guidance.py` GuidanceBackend |
# | in the scheduler | [`GrammarSchedulerHook`](../stage03_engine/core/features/structured_output/scheduler_hook.py) | `v1/core/sched/scheduler.py` grammar_bitmask |
# | on the logits | [`GrammarRunnerHook`](../stage03_engine/core/features/structured_output/runner_hook.py), [`apply_token_bitmask`](../stage04_kernels/features/bitmask.py) | `v1/structured_output/utils.py` apply_grammar_bitmask |
# | compiled within limits | [`Compilers`](../stage03_engine/core/features/structured_output/compilers.py), [`GrammarChecker`](../stage03_engine/core/features/structured_output/grammar_checker.py) | `v1/structured_output/__init__.py` a thread pool |

# %%
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import lab
import matplotlib.pyplot as plt
import numpy as np
import torch

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.structured_output.backend_guidance import Guidance, Matcher
from stage03_engine.core.features.structured_output.lark import to_lark
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.grammar.vocabulary import read_vocabulary
from stage04_kernels.features.bitmask import apply_token_bitmask
from stagetrace import read_run
from stagetrace.figures.style import KINDS

config = EngineArgs.from_kwargs(model="gpt2-tiny")
tokenizer = init_tokenizer_from_configs(config)
SIZE = config.shape.vocab_size
backend = Guidance(read_vocabulary(config), SIZE)


def matcher(kind, text):
    """A request's way through this grammar, at its beginning."""
    return Matcher(backend, backend.compile(to_lark(kind, text, any_whitespace=False)), ignore_eos=False)


def allowed(state):
    """The token ids that a state allows."""
    bits = np.unpackbits(np.frombuffer(state.mask, dtype=np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def shown(ids):
    """Tokens as texts."""
    return [repr(tokenizer.token_text(i)) if i != tokenizer.eos_token_id else "end" for i in ids]


# %% [markdown]
# ## From a choice to bits
#
# The answer must be `yes` or `no`. A grammar is about characters, and the model chooses among tokens. So for each position there is a set of tokens that may come next: those with which the text so far can
# still become one of the choices.

# %% [markdown] tags=["predict"]
# > **Predict.** The choices are `yes` and `no`, and nothing has been said yet. How many of the 2,048 tokens are allowed? Only two? And how many after the token `y`?

# %% tags=["predict"]
lab.predict(allowed_first=None, allowed_after_y=None)

# %%
yes_or_no = matcher("choice", '["yes", "no"]')
first = yes_or_no.start()
print("first:", shown(allowed(first)))
(y,) = tokenizer.encode("y")
second = yes_or_no.accept([y])
print("after 'y':", shown(allowed(second)))
print(f"a mask: {len(first.mask)} bytes for {SIZE:,} tokens")
lab.claim("a bit for each token, in words of 32", len(first.mask) == -(-SIZE // 32) * 4)
lab.compare(allowed_first=len(allowed(first)), allowed_after_y=len(allowed(second)))

# %% [markdown]
# Every way to spell the answer in tokens is allowed, not only the one that the tokenizer would choose: `y` + `es` is as good as `yes`. So the model keeps its say in how.
#
# ## From bits to a token
#
# All that the sampler learns is a mask: forbidden tokens get the logit -inf, and then temperature, top-p and the draw go on as always.

# %%
logits = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0))  # two requests; only the second has a grammar
words = torch.from_numpy(np.frombuffer(first.mask, dtype=np.int32).copy())[None]
masked = apply_token_bitmask(logits, words, torch.tensor([1]))
print("finite logits:", *torch.isfinite(masked).sum(dim=1).tolist())
lab.claim("the row without a grammar is untouched, bit for bit", torch.equal(masked[0], logits[0]))
lab.claim(
    "the other one can only say what is allowed",
    set(torch.isfinite(masked[1]).nonzero().flatten().tolist()) == set(allowed(first)),
)

# %% [markdown]
# ## A schema, served

# %%
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ROMEO", "JULIET"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
}
server = lab.Server("--num-threads", "1", "--grammar-compile-seconds", "1", "--disable-any-whitespace")


def ask(prompt="Who is it?", **fields):
    """(status, the first choice of the answer, or its error)."""
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "return_token_ids": True} | fields
    status, answer = server.ask("/v1/completions", body)
    return status, answer["choices"][0] if status == 200 else answer["error"]["message"]


_, plain = ask(max_tokens=20)
_, forced = ask(structured_outputs={"json": SCHEMA})
print("without:", repr(plain["text"]))
print("with:   ", repr(forced["text"]), "-", forced["finish_reason"])
value = json.loads(forced["text"])
lab.claim("it follows the schema", value["name"] in ("ROMEO", "JULIET") and 10 <= value["age"] <= 99)

# %% [markdown]
# The form is right, and of course nobody knows how old Romeo is: a mask makes an answer valid, not true.
#
# What would the model have said? The answer's own `logprobs` do not tell: the mask comes before them, in vLLM too. So we send the answer back as a prompt, and ask for `prompt_logprobs`: how probable each of its tokens is to
# the model when nobody forbids anything, and which it finds more probable.

# %%
ids = forced["token_ids"]
_, asked = ask([*tokenizer.encode("Who is it?"), *ids], max_tokens=1, prompt_logprobs=1)
told = asked["prompt_logprobs"][-len(ids) :]
rows, agreed = [], 0
for token_id, entry in zip(ids, told):
    own = entry[str(token_id)]
    best = min(entry.values(), key=lambda one: one["rank"])
    agreed += own["rank"] == 1
    rows.append(
        (
            repr(tokenizer.token_text(token_id)),
            f"{np.exp(own['logprob']):.2%}",
            own["rank"],
            repr(best["decoded_token"]),
        )
    )
lab.table(rows[:12], "token", "probable", "rank", "would have said")
print(f"{agreed} of {len(ids)} tokens are what the model would have said anyway")
lab.claim("the model was overruled", agreed < len(ids) / 2)

# %% [markdown]
# A model that is constantly overruled answers worse than it could: say in the prompt, too, what the form is.
#
# ## How many bits are set, and jump-ahead

# %%
path = matcher("json", json.dumps(SCHEMA))
states = [path.start()]
for token_id in ids:
    states.append(path.accept([token_id]))
counts = [len(allowed(state)) for state in states[:-1]]
figure, axes = plt.subplots(figsize=(8, 2.4))
axes.bar(range(len(counts)), counts, color=KINDS["prefill"].face)
axes.set_yscale("log")
axes.set_xticks(range(len(counts)), [repr(tokenizer.token_text(i))[1:-1] for i in ids], rotation=60, fontsize=7)
axes.set(ylabel="allowed tokens", xlabel="the token that came")
lab.picture(figure, f"Of {SIZE:,} tokens, only a few are ever allowed. Where it is one, the model has no choice.")
forced_steps = counts.count(1)
print(f"{forced_steps} of {len(counts)} steps had one allowed token")
lab.claim("at the end nothing can follow", states[-1].complete and not states[-1].mask)

# %% [markdown]
# Where only one token is allowed, a whole pass through the model has been computed for nothing. **Jump-ahead** writes what is forced into the request at once, as if it were prompt: several tokens in one step. It has a
# catch: whoever writes the forced *text* must choose its tokens, and the usual way to spell it may reach over the end of what is forced (`": "` and `1` may be one token, `": 1`). Neither vLLM's default path nor this
# project does it. The end comes early here: as soon as nothing can follow, the request ends. vLLM's guidance backend leaves only the end-of-text token allowed then, and spends one more step on it.

# %%
lab.claim("it ended because the text was complete", forced["finish_reason"] == "stop" and forced["text"].endswith("}"))

# %% [markdown]
# ## Four kinds, one mechanism

# %%
KINDS_OF_ANSWER = {
    "choice": {"choice": ["To be", "not to be"]},
    "regex": {"regex": r"[A-Z]{4,8}: [a-z ]{3,9}\."},
    "json": {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    "grammar": {"grammar": 'root ::= line line\nline ::= "- " [a-z]+ "\\n"'},
}
answers = {kind: ask(structured_outputs=wanted)[1]["text"] for kind, wanted in KINDS_OF_ANSWER.items()}
for kind, text in answers.items():
    print(f"{kind:8} {text!r}")
try:
    json.loads(answers["json"])
except json.JSONDecodeError:
    print("max_tokens came first: this is the beginning of a valid text, and not a valid text")
lab.claim("the expression matches the whole answer", re.fullmatch(KINDS_OF_ANSWER["regex"]["regex"], answers["regex"]))
print()
for kind in ("choice", "regex"):
    given = KINDS_OF_ANSWER[kind][kind]
    print(to_lark(kind, given if kind == "regex" else json.dumps(given)).splitlines()[-1])

# %% [markdown]
# A number may be as long as it likes, and the model likes to go on. A grammar says what may come, and not when to stop: look at `finish_reason` before you parse.
#
# ## Who waits for whom
#
# The grammar of a request must be compiled before its first token. That takes from a millisecond to for ever: a grammar is a program that a stranger has written. Where may it be compiled?

# %% [markdown] tags=["predict"]
# > **Predict.** A request arrives whose schema would take minutes to compile, and after it three without one. The engine serves first come, first served. Who is admitted first: the bomb, or those behind it?

# %% tags=["predict"]
lab.predict(admitted_first=None)  # "the bomb" or "those behind it"

# %%
BOMB = {"type": "integer", "multipleOf": 123456789}  # 44 characters, and minutes of work
pool = ThreadPoolExecutor(4)
events = server.watch("/v1/engine/events")
next(events)
begin = time.perf_counter()
bomb = pool.submit(ask, structured_outputs={"json": BOMB})
queued = next(event["req"] for event in events if event["name"] == "sched.queued")
others = [ask("To be", max_tokens=4) for _ in range(3)]
others_took = time.perf_counter() - begin
came_first = not bomb.done()
health = server.ask("/health")[0]
status, refusal = bomb.result()
events.close()
print(f"the bomb: {status} {refusal!r}")
lab.claim("it is refused", status == 400)
lab.claim("it was in the queue first, and the three behind it were served", [s for s, _ in others] == [200] * 3)
lab.claim("/health answered meanwhile", health == 200)
print(
    f"three others took {others_took:.2f} s together; {'the bomb was still being tried' if came_first else 'it was over by then'}"
)

# %% [markdown]
# A new grammar is first compiled in a process of its own that has a limit of time and of memory ([`GrammarChecker`](../stage03_engine/core/features/structured_output/grammar_checker.py)): a thread cannot be stopped, a process can. The first request with a grammar waits for that process to start. Only what has
# passed is compiled in the engine, in a thread, while the steps of the others go on. The server's event loop does not even begin: it checks the length and sends the text on.
#
# Why does the *scheduler* deal with the mask, and not the sampler alone? Because three of its decisions depend on the grammar: a request waits until its grammar is there, and others pass it; the mask of a step
# depends on every token before it, so here no step is scheduled ahead of the last one's result (vLLM schedules and runs the model ahead, and defers only the sampling); and the grammar says when the request ends.

# %%
server.close()
run = read_run(server.folder)
request = next(e.req for e in run.named("grammar.ready"))
told = {"grammar.compiled", "grammar.ready", "sched.queued", "sched.admit", "sched.finished"}
story = [event for event in run.of_request(request) if event.name in told]
for event in story:
    at = (event.ts - story[0].ts) / 1e6
    print(
        f"{at:7.1f} ms  {event.proc:15} {event.name:17}",
        {k: v for k, v in event.args.items() if k in ("kind", "cached", "by")},
    )
admitted = [event.req for event in run.named("sched.admit")]
lab.claim("the bomb was never admitted", not any(req == queued for req in admitted))
names = [event.name for event in story]
lab.claim(
    "compiled, then ready, then admitted",
    names.index("grammar.compiled") < names.index("grammar.ready") < names.index("sched.admit"),
)
lab.claim("the request ended by its grammar", story[-1].args["by"] == "grammar")
lab.compare(admitted_first="those behind it")

# %% [markdown]
# ## What it costs
#
# Compiling, once for each grammar; a mask, at each step for each request; and the mask on its way from the scheduler to the sampler.


# %%
def milliseconds(work, times):
    """The median time of a call."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        taken.append((time.perf_counter() - begin) * 1e3)
    return sorted(taken)[times // 2]


compile_ms = milliseconds(lambda: backend.compile(to_lark("json", json.dumps(SCHEMA))), 5)
compiled = backend.compile(to_lark("json", json.dumps(SCHEMA), any_whitespace=False))
walk_ms = milliseconds(lambda: Matcher(backend, compiled, False).start(), 20)
apply_ms = milliseconds(lambda: apply_token_bitmask(logits, words, torch.tensor([1])), 20)
lab.table(
    [("compile the schema", compile_ms), ("the first mask", walk_ms), ("apply it to the logits", apply_ms)], "", "ms"
)
bytes_gpt2 = -(-50257 // 32) * 4
print(f"with GPT-2's vocabulary a mask has {bytes_gpt2:,} bytes, for each such request in each step")
lab.claim("a mask is a bit a token: an eighth of a byte, not the 4 of a logit", bytes_gpt2 * 8 - 50257 < 32)

# %% [markdown]
# The masks of all requests have a budget in each step (`--grammar-budget-seconds`). A request whose grammar needs longer sits the next steps out (`grammar.missed`), and the others go on.
#
# **With speculation** each draft needs a mask of its own, and the grammar must be able to go back when a draft is rejected. vLLM does that (it walks the grammar along the drafts, and rolls it back). Here a request with a
# grammar gets no drafts.
#
# > **What is often said**, and in which of the [five descriptions](MAP.md)
# >
# > - *"Apply guided decoding logits processor"* before `forward()` (*REST API to Inference*, layer 9). Then there are no logits yet. The mask comes after the model, on the row of the last token.
# > - *Temperature, top-k, top-p, and then logits processors* (*REST API to Inference*, layer 9). In this order top-k could leave only tokens that the grammar forbids. The mask comes first.

# %%
transforms = [e for e in run.named("sampler.transform") if e.args["transform"] == "grammar_mask"]
computed = {event.step: event.ts for event in run.named("model.logits")}
lab.claim(
    "each mask comes after the logits of its step", all(e.ts >= computed[e.step] for e in transforms) and transforms
)
lab.claim(
    "the most probable token is not allowed: top-k 1 and then the mask would leave nothing",
    int(logits[1].argmax()) not in allowed(first),
)

# %% [markdown] tags=["exercise"]
# ## Exercise: the mask of a choice
#
# **Contract.** `choice_mask(choices, so_far, tokens, end)`: `choices` are the texts that the answer may be, `so_far` is the text up to now, `tokens[i]` is the text of token i, and `end` is the id of the end-of-text token. Return the mask as
# bytes: bit i (of byte i // 8, the lowest bit first) is 1 if token i may come next.
#
# - A token may come if the text with it is the beginning of a choice, or is one. A token without text may never come.
# - The end may come if the text is a choice.
# - If nothing but the end may come, the request is over: return `b""`.
# - The mask has whole words of 32 bits.
#
# The real part is [`Matcher`](../stage03_engine/core/features/structured_output/backend_guidance.py), which can do this for any grammar.


# %% tags=["exercise"]
def choice_mask(choices: list[str], so_far: str, tokens: list[str], end: int) -> bytes:
    """The tokens that may come next, one bit each; nothing if the answer is complete."""
    raise NotImplementedError


# %% tags=["check"]
from stage03_engine.grammar.vocabulary import Vocabulary

TOKENS = ["", *"abc", "ab", "bc", "aa", "abc", "ca", "b a", " ", "cab", *"defghijklmnopqrstuvwxyz"]


def real_mask(choices, so_far, tokens, end):
    """What the real part says."""
    small = Guidance(Vocabulary([token.encode() for token in tokens], end), len(tokens))
    way = Matcher(small, small.compile(to_lark("choice", json.dumps(choices))), ignore_eos=False)
    state = way.start()
    for character in so_far:
        state = way.accept([tokens.index(character)])
    return state.mask


def case(seed):
    rng = random.Random(seed)
    choices = list({"".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))})
    choice = rng.choice(sorted(choices))
    return sorted(choices), choice[: rng.randint(0, len(choice))], TOKENS, 0


passed = lab.check(choice_mask, real_mask, map(case, range(60)))
