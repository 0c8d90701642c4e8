# %% [markdown]
# # 04 AsyncLLM: the front end of the engine
#
# *Before: [00](00_the_whole_walk.ipynb) · about 35 minutes with the exercise*
#
# **Question.** The model knows integers, the client knows text, and many clients wait at once. What stands between them, and how can one background task
# serve all of them?
#
# | part | here | vLLM |
# |---|---|---|
# | the whole | [`AsyncLLM`](../stage03_engine/frontend/async_llm.py) | `v1/engine/async_llm.py` (AsyncLLMEngine was the older engine) |
# | tokenizer | [`Tokenizer`](../stage03_engine/frontend/tokenizer.py) | `tokenizers/registry.py` |
# | text to request | [`InputProcessor`](../stage03_engine/frontend/input_processor.py) | `v1/engine/input_processor.py` InputProcessor |
# | outputs to text | [`OutputProcessor`](../stage03_engine/frontend/output_processor.py), [`IncrementalDetokenizer`](../stage03_engine/frontend/detokenizer.py) | `v1/engine/output_processor.py`, `detokenizer.py` |
# | hand-over to one caller | [`RequestOutputCollector`](../stage03_engine/frontend/output_processor.py) | `v1/engine/output_processor.py` |
# | the way to the core | [`AsyncMPClient`](../stage03_engine/frontend/core_client.py) | `v1/engine/core_client.py` |

# %%
import asyncio
import time

import lab

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams

lab.source(AsyncLLM.__init__)

# %% [markdown]
# ## Assembling it
#
# `from_vllm_config` returns at once: the engine process starts first and loads while the tokenizer and the processors are made. `start()` waits for it.

# %%
config = EngineArgs.from_kwargs(model="gpt2-tiny", num_gpu_blocks_override=64, disable_log_stats=True)
with lab.record("APIServer") as folder:
    begin = time.perf_counter()
    engine = AsyncLLM.from_vllm_config(config)
    made = time.perf_counter()
    ready = await engine.start()
    started = time.perf_counter()
print(
    f"made in {(made - begin) * 1e3:.1f} ms, ready after {(started - begin) * 1e3:.0f} ms: {ready.num_gpu_blocks} blocks, {ready.max_model_len} tokens at most"
)

# %%
from stagetrace import read_run

for event in read_run(folder).events[1:]:
    print(event.console_line())

# %% [markdown]
# ## The tokenizer
#
# A byte-level tokenizer: each token stands for some bytes, and every text can be written. The bundled model has a small vocabulary of its own.

# %%
tokenizer = engine.tokenizer
for text in ("To be, or not to be", "ROMEO:", " world", "naïve", "🙂"):
    ids = tokenizer.encode(text)
    print(f"{text!r:22} {ids}  {[tokenizer.token_bytes(i) for i in ids]}")

# %% [markdown] tags=["predict"]
# > **Predict.** "🙂" is one character and several tokens. A client that streams would like a piece of text per token. What can it be sent after the first of
# > these tokens?

# %% tags=["predict"]
lab.predict(after_the_first=None)  # a text

# %%
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer

ids = tokenizer.encode("I 🙂 naïve")
detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
rows = []
for token_id in ids:
    detokenizer.update([token_id])
    rows.append(
        (
            token_id,
            tokenizer.token_bytes(token_id),
            repr(tokenizer.decode([token_id])),
            repr(detokenizer.next_text(delta=True)),
        )
    )
lab.table(rows, "token", "its bytes", "decoded alone", "sent to the client")
lab.compare(after_the_first=next(sent.strip("'") for _, data, _, sent in rows if b"\xf0" in data))

# %% [markdown]
# Nothing: bytes wait until they form whole characters. Decoding each token alone would give replacement characters.
#
# **A number that is often given wrongly.** *Execution Flow* (8.2, 9.2; [all five descriptions](MAP.md)) calls 5773 the token " world" of GPT-2. Here is an excerpt of the real
# vocabulary:

# %%
number_of = {text: number for number, text in lab.GPT2_TOKENS.items()}  # an excerpt of GPT-2's vocab.json
print("5773 is", repr(lab.GPT2_TOKENS[5773]), "and ' world' is", number_of[" world"])
print("'Once upon a time' is", [number_of[token] for token in ("Once", " upon", " a", " time")])
try:
    gpt2 = EngineArgs.from_kwargs(model="gpt2", load_format="dummy", tokenizer="gpt2")
    from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs

    real = init_tokenizer_from_configs(gpt2)
except Exception as error:
    print("(gpt2's own tokenizer is not on this machine, so only the excerpt is shown:", type(error).__name__ + ")")
else:
    texts = {number: real.decode([number]) for number in lab.GPT2_TOKENS}
    lab.claim("the excerpt is what gpt2's own tokenizer says", texts == lab.GPT2_TOKENS)
lab.claim("5773 is not ' world'", lab.GPT2_TOKENS[5773] != " world" and number_of[" world"] == 995)

# %% [markdown]
# ## Stop strings
#
# A stop string may be spread over several tokens, so text that could still become one waits, and no longer than that.

# %%
params = SamplingParams(stop=["be, or"])
detokenizer = IncrementalDetokenizer(tokenizer, params)
rows = []
for token_id in tokenizer.encode("To be, but not to be, or what"):
    stop = detokenizer.update([token_id])
    rows.append(
        (
            repr(tokenizer.decode([token_id])),
            repr(detokenizer.next_text(delta=True)),
            repr(detokenizer.text[detokenizer.safe :]),
            stop or "",
        )
    )
    if stop:
        break
lab.table(rows, "token", "sent", "held back", "stop string found")

# %% [markdown]
# ## One output handler for everybody
#
# [`AsyncLLM.generate`](../stage03_engine/frontend/async_llm.py) is an asynchronous generator per request. None of them reads the socket: one task does, the output handler, and puts
# each output into the collector of its request.

# %% [markdown] tags=["predict"]
# > **Predict.** Five requests of 12 tokens each, at the same time. How many messages does the engine send: 60, 12, or a few more than 12?

# %% tags=["predict"]
lab.predict(messages_of_five=None)

# %%
lab.source(AsyncLLM._process)


async def ask(number, prompt, length=12, pause=0.0):
    """All the pieces of one answer, as (seconds, text, tokens in it)."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    pieces = []
    async for output in engine.generate(prompt, params, f"r{number}"):
        pieces.append((time.perf_counter(), output.outputs[0].text, len(output.outputs[0].token_ids)))
        if pause:
            await asyncio.sleep(pause)
    return pieces


with lab.record("APIServer") as folder:
    answers = await asyncio.gather(
        *(ask(n, prompt) for n, prompt in enumerate(["ROMEO:", "To be", "O", "My lord", "All:"]))
    )
received = read_run(folder).named("zmq.outputs_received")
print("tokens:  ", sum(n for pieces in answers for _, _, n in pieces))
print("messages:", len(received), "with so many outputs each:", [event.args["num_outputs"] for event in received])
lab.claim("a few more messages than 12, not 60", 12 <= len(received) < 30)
lab.compare(messages_of_five=len(received))

# %% [markdown]
# One message per engine step holds the outputs of all requests in that step. The requests did not arrive in the same instant, so the first and the last steps are not
# shared by all. Nothing is batched in the front end: the [`InputProcessor`](../stage03_engine/frontend/input_processor.py) turns one text into one request, and the scheduler in the other process decides
# who shares a step.
#
# ## A slow reader
#
# A collector holds one output. If its reader is slower than the engine, newer tokens are added to the waiting output.

# %%
fast, slow = await asyncio.gather(ask("fast", "ROMEO:", 24), ask("slow", "ROMEO:", 24, pause=0.03))
for name, pieces in (("fast", fast), ("slow", slow)):
    print(f"{name}: {len(pieces):2} pieces, tokens in each: {[n for _, _, n in pieces]}")
lab.claim("same text", "".join(t for _, t, _ in fast) == "".join(t for _, t, _ in slow))

# %% [markdown]
# So memory does not grow with the slowness of a client, the engine never waits for one, and no token is lost.

# %%
engine.shutdown()

# %% [markdown] tags=["exercise"]
# ## Warm-up: what must wait
#
# This is the warm-up. In exercise [2](exercises/ex02_stream/README.md) you write the real part, and it serves in the real server: `stages course start 2`.
#
# Write `held_back(text, stops)`: how many characters at the end of `text` could be the beginning of a stop string that is not complete yet. These may not be
# sent. The rest may.
#
# - `held_back("to b", ["be, or"])` is 1: "b" may become "be, or".
# - `held_back("to be ", ["be, or"])` is 0: "be " cannot.
# - The longest such end counts: `held_back("aa", ["aab"])` is 2.
# - `text` holds no whole stop string: that has been looked for before.
#
# The real part is [`held_back`](../stage03_engine/frontend/detokenizer.py); in vLLM the detokenizer holds back a fixed number of characters, the length of the longest stop string less one
# (`v1/engine/detokenizer.py`). Too few is wrong (a beginning has left already), too many is late.


# %% tags=["exercise"]
def held_back(text: str, stops: list[str]) -> int:
    """How many characters at the end of `text` must wait."""
    raise NotImplementedError


# %% tags=["check"]
import random

from stage03_engine.frontend import detokenizer as real_part


def case(seed):
    rng = random.Random(seed)
    letters = "ab, "[: rng.randint(1, 4)]

    def word(low, high):
        return "".join(rng.choice(letters) for _ in range(rng.randint(low, high)))

    text = word(0, 12)
    return text, [stop for stop in (word(1, 5) for _ in range(rng.randint(0, 6))) if stop not in text]


passed = lab.check(held_back, real_part.held_back, map(case, range(3000)))

# %% [markdown]
# That was the warm-up. Exercise 2 has the real part:

# %%
if passed:
    import stage01_cli.tools.course as course

    course.start(2, lab.WORK)  # copies the starter into work/; then course.check(2)
else:
    print("This begins exercise 2 once yours passes.")
