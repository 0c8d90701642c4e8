# %% [markdown]
# # 23 From zero: what a token is, and why serving it is hard
#
# *Before: nothing · about 40 minutes with the exercise*
#
# **Question.** You have used a chatbot, and never seen what it is made of. What goes in, what comes out, why does it come word by word, and why does it take a machine with so much memory?
#
# It has the number 23, and it is the one to begin with if "token" is a new word to you. All numbers are those of `gpt2-tiny`, a model so small that it runs in this notebook. The large ones do the same.
#
# | part | here | in vLLM |
# |---|---|---|
# | text to numbers | [`Tokenizer`](../stage03_engine/frontend/tokenizer.py) | `tokenizers/` |
# | one guess | [`GPT2LMHeadModel`](../stage03_engine/core/models/gpt2.py) | `model_executor/models/gpt2.py` |
# | the loop | [`LLM.generate`](../stage03_engine/llm/llm.py), [step one of the ladder](ladder/README.md) | `entrypoints/llm.py` |
# | what a chip can serve | [`napkin`](../stage01_cli/tools/napkin/arithmetic.py) | none |

# %%
import math
import time
from collections.abc import Callable

import lab

from stage01_cli.tools.napkin.arithmetic import Load, napkin
from stage01_cli.tools.napkin.facts import CHIPS, MODELS
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

llm = LLM("gpt2-tiny", max_model_len=256, kv_cache_memory_bytes=20_000_000, num_threads=1)
TEXT = "To be, or not to be"

# %% [markdown]
# ## Text becomes numbers
#
# A model computes with numbers, so text is cut into pieces from a fixed list, and each piece is replaced by its place in the list. A piece is a *token*, the list the *vocabulary*. Frequent words are one piece, rare ones
# several, and a space belongs to the word after it.

# %% [markdown] tags=["predict"]
# > **Predict.** Into how many tokens is `To be, or not to be` cut?

# %% tags=["predict"]
lab.predict(tokens_of_the_text=None)

# %%
ids = llm.tokenizer.encode(TEXT)
lab.table([(token, repr(llm.tokenizer.token_text(token))) for token in ids], "token", "text")
rare = llm.tokenizer.encode("Constantinople")
print("Constantinople:", [llm.tokenizer.token_text(token) for token in rare])
lab.claim("nothing is lost: put together, the pieces are the text", llm.tokenizer.decode(ids) == TEXT)
lab.compare(tokens_of_the_text=len(ids))

# %% [markdown]
# ## One guess
#
# That is all a language model does: given some tokens, it says for *each* token of the vocabulary how likely it comes next. One computation through all layers, one list of probabilities. Here are the five likeliest.

# %%
one = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
found = llm.generate(TEXT, one)[0].outputs[0].logprobs[0]
likeliest = list(zip(found.token_ids, found.logprobs))[1:]  # the first is the token that was taken
lab.table(
    [(repr(llm.tokenizer.token_text(token)), f"{math.exp(logprob):.1%}") for token, logprob in likeliest],
    "next",
    "probability",
)
vocabulary = llm.vllm_config.model_config.shape.vocab_size
print(f"and {vocabulary - 5:,} others share the rest: {1 - sum(math.exp(logprob) for _, logprob in likeliest):.0%}")
lab.claim("the greedy choice is the likeliest", found.token_ids[0] == likeliest[0][0])

# %% [markdown]
# ## The loop
#
# How does a text come of it? Take one of the likely tokens, put it at the end, and ask again. Nothing is planned ahead: each word is the answer to "what comes after this?", and the answer to a long question is a thousand such guesses, one after the other.
# *That* is why the words of a chatbot come one by one.

# %%
text = list(ids)
for _ in range(12):
    guess = llm.generate({"prompt_token_ids": text}, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    text += guess[0].outputs[0].token_ids
by_hand = llm.tokenizer.decode(text[len(ids) :])
whole = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0].text
print(f"{TEXT}{by_hand!r}")
lab.claim("twelve questions by hand give what the engine gives for one request", by_hand == whole)

# %% [markdown]
# The player shows the same of a recorded answer, token by token (`stages trace play trace/recorded/chances`):
#
# ![A token's chances: the five likeliest candidates with their probabilities as bars, the chosen one marked](pictures/chances.png)
#
# Always taking the likeliest is dull. *Sampling* throws dice that are loaded with the probabilities; the *temperature* says how much the likely ones are preferred.

# %%
for temperature in (0, 0.7, 1.3):
    answer = llm.generate(TEXT, SamplingParams(temperature=temperature, seed=4, max_tokens=14, ignore_eos=True))
    print(f"temperature {temperature:3}: {answer[0].outputs[0].text!r}")

# %% [markdown]
# ## Why it is slow
#
# Each guess multiplies with every number of the model once: its *weights*. They do not fit into the part of a chip that computes, so for each token all of them are fetched from memory again. The time of a token is the time of that reading.

# %% [markdown] tags=["predict"]
# > **Predict.** gpt2-tiny has 5.4 million weights of four bytes. Llama-2-7B has 6.7 billion of two bytes, and the memory of an H100, one of the fastest there are, gives 3,350 GB each second. How many milliseconds does one
# > token of Llama-2-7B take there at least?

# %% tags=["predict"]
lab.predict(milliseconds=None)

# %%
llama, h100 = MODELS["Llama-2-7B"], CHIPS["H100"]
least = 2 * llama.weights / h100.bandwidth * 1000
print(f"{2 * llama.weights / 1e9:.1f} GB, {h100.bandwidth / 1e9:,.0f} GB/s: {least:.1f} ms")
lab.compare(milliseconds=round(least))
start = time.perf_counter()
llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
each = (time.perf_counter() - start) / 100
lab.say(f"And here? A token of gpt2-tiny took {each * 1e3:.1f} ms on this machine, for 22 MB of weights.")

# %% [markdown]
# What helps: **many at once**. The weights that were fetched for one user's token serve the tokens of all others in the same step. This is *batching*, and how a server does it is the heart of this project.

# %%
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
start = time.perf_counter()
for _ in range(8):
    llm.generate(TEXT, params)
in_turn = time.perf_counter() - start
start = time.perf_counter()
llm.generate([TEXT] * 8, params)
together = time.perf_counter() - start
lab.say(f"Eight users one after the other: {in_turn:.2f} s. All in the same steps: {together:.2f} s.")
lab.claim("together is faster", together < in_turn, measured=True)

# %% [markdown]
# ## Where the memory goes
#
# To guess the next token, every layer looks back at all earlier ones. What it needs of a token (a *key* and a *value*, both rows of numbers) does not change any more, so it is kept: the *KV cache*. Without it, each guess would compute the
# whole text again. With it, each token that was ever read or written takes memory until its text is finished.

# %%
shape = llm.vllm_config.model_config.shape
per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
print(
    f"gpt2-tiny: 2 x {shape.num_layers} layers x {shape.num_kv_heads} heads x {shape.head_dim} numbers x 4 bytes = {per_token:,} bytes a token"
)
big = 2 * llama.num_layers * llama.num_kv_heads * llama.head_dim * 2
print(f"Llama-2-7B: {big:,} bytes a token, {big * 2000 / 1e9:.1f} GB for a talk of 2,000 tokens")
lab.claim("a hundred talks of 2,000 tokens take more memory than the weights", 100 * 2000 * big > 2 * llama.weights)
llm.shutdown()

# %% [markdown]
# That is the other half of serving: the memory of a chip is full of other people's talks. Who gets how much, what happens when it is full, what two talks can share: [phase 8](08_execution.ipynb), [10](10_scheduler_lab.ipynb) and [11](11_paged_attention.ipynb) are about it.
#
# ## What a chip can serve
#
# Bytes and operations alone say how many users a chip has room for, and what a million tokens cost. [The napkin](16_napkin.ipynb) takes it apart.

# %%
for prompt, answer in ((100, 100), (1000, 300), (3000, 500)):
    load = Load(prompt=prompt, answer=answer, tpot=0.05, price=3.0)
    served = napkin(llama, h100, load)
    print(
        f"{prompt:5,} tokens of prompt, {answer} of answer: {served.users:4} users, {served.cost:.2f} for a million tokens"
    )

# %% [markdown]
# The longer the talks, the fewer users: it is the memory that ends first, not the arithmetic. (3 an hour is an example of a price.)
#
# **Go on** with [the ladder](ladder/README.md), where this loop becomes an engine in five steps, or with [00, the whole walk](00_the_whole_walk.ipynb).

# %% [markdown] tags=["exercise"]
# ## Exercise: the loop
#
# **Contract.** `generate(guess, prompt, most, end)`: `guess(tokens)` returns the probabilities of all tokens of a small vocabulary, as a list, given the tokens so far. Return the tokens that are generated after `prompt`, a list of numbers, by always
# taking the likeliest.
#
# - Of several that are equally likely, the first one is taken.
# - At most `most` tokens are generated. `end` is a token that ends the text: it belongs to the result, and nothing comes after it.
# - `prompt` itself is not in the result, and not changed. `guess` is asked once for each token, with all tokens so far.


# %% tags=["exercise"]
def generate(guess: Callable[[list], list], prompt: list, most: int, end: int) -> list:
    """The tokens after the prompt."""
    raise NotImplementedError


# %% tags=["check"]
def real_generate(guess, prompt, most, end):
    """Greedy."""
    made = []
    while len(made) < most and end not in made:
        chances = guess(prompt + made)
        made.append(chances.index(max(chances)))
    return made


def judged(function):
    def call(seed, prompt, most, end):
        asked, given = [], list(prompt)

        def guess(tokens):
            asked.append(list(tokens))
            mixed = [(seed * 31 + sum(tokens) * 7 + len(tokens) * token) % 5 for token in range(6)]
            return [part / sum(mixed) if sum(mixed) else 1 / 6 for part in mixed]

        made = function(guess, given, most, end)
        return list(made), asked, "the prompt is as it was" if given == prompt else "the prompt was changed"

    return call


cases = [(seed, [seed % 6, 1, 2][: 1 + seed % 3], seed % 7, seed % 6) for seed in range(60)]
passed = lab.check(judged(generate), judged(real_generate), cases)
