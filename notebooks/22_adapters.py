# %% [markdown]
# # 22 Adapters: many models for the price of one
#
# *Before: [08](08_execution.ipynb), [10](10_scheduler_lab.ipynb) · about 45 minutes with the exercise*
#
# **Question.** A hundred customers want a hundred models, each a little different. A hundred copies of the weights fit nowhere. How can one copy serve them all, in the same batch?
#
# | part | here | vLLM |
# |---|---|---|
# | training a pair of thin matrices | [`train_adapter`](../stage03_engine/bundled/training/train_adapter.py), on a [ship's log](../stage03_engine/bundled/training/ships_log.py) | none: PEFT does it |
# | reading it | [`read_adapter`](../stage03_engine/core/features/lora/adapter.py) | `lora/lora_model.py` LoRAModel |
# | which adapters there are, and their numbers | [`AdapterRegistry`](../stage03_engine/frontend/features/adapters/registry.py) | `entrypoints/openai/models/serving.py` OpenAIServingModels |
# | rows of a batch to adapters | [the room of adapters](../stage03_engine/core/features/README.md#adapters) | `lora/punica_wrapper/punica_base.py` |
# | while the server runs | [`load_lora_adapter`](../stage02_server/features/adapters/routes.py) | `entrypoints/serve/lora/api_router.py` |

# %%
import random

import lab
import numpy as np
from safetensors.numpy import load_file

from stage03_engine.bundled.training.ships_log import ships_log
from stage03_engine.bundled.training.train_adapter import Recipe, train_adapter
from stage03_engine.frontend.features.call_forms.call_forms import LoRARequest
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

# %% [markdown]
# ## What is learnt
#
# A linear layer computes y = W x. To teach the model another style one could change W. An adapter leaves W as it is and learns what to add: y = W x + s · B A x, where A has a few rows and B as many columns
# (their number is the *rank*). B A is as large as W, but it is never written down.
#
# The new style is the log of a ship, which a script composes out of phrases. The model has read nothing but Shakespeare.

# %%
text = ships_log(seed=1, days=60)
print(text[:300])

# %% [markdown] tags=["predict"]
# > **Predict.** The first layer of gpt2-tiny has a matrix of 768 x 256. How many numbers has a pair of rank 4 beside it? And how often does what is learnt fit into the model's 5,387,776 numbers, if each of its 24 matrices
# > has such a pair: about 5, 50 or 500 times?

# %% tags=["predict"]
lab.predict(numbers_of_a_pair=None, about_so_often=None)

# %%
ship = BUNDLED_FOLDER / "gpt2-tiny-ship"
pairs = load_file(ship / "adapter_model.safetensors")
FIRST = "base_model.model.transformer.h.0.attn.c_attn.lora_{}.weight"
a, b = (pairs[FIRST.format(part)] for part in "AB")
numbers = sum(pair.size for pair in pairs.values())
print(f"A {a.shape}, B {b.shape}: {a.size + b.size:,} numbers instead of {b.shape[0] * a.shape[1]:,}")
print(f"all {len(pairs) // 2} pairs: {numbers:,} numbers, {sum(pair.nbytes for pair in pairs.values()) / 1e6:.1f} MB")
lab.claim(
    "a corner of 64 x 64 of B A has no more than 4 independent rows",
    np.linalg.matrix_rank(b[:64].astype(np.float64) @ a[:, :64]) <= 4,
)
often = 5_387_776 / numbers
print(f"it fits {often:.0f} times into the model")
lab.compare(numbers_of_a_pair=a.size + b.size, about_so_often=min((5, 50, 500), key=lambda guess: abs(guess - often)))

# %% [markdown]
# ## Learning it
#
# The bundled adapter took 120 steps. Here are twelve: A begins at random and B at zero, so the first step starts from the model as it is. *Bits per byte* is how much the model still has to be told about a text that it has not read.

# %%
mine = lab.new_folder() / "mine"
before, after = train_adapter(text, mine, how=Recipe(steps=12, batch=2, window=48))
print(f"held-out text: {before:.2f} bits per byte before, {after:.2f} after 12 steps")
lab.claim("twelve steps are enough to be surprised less", after < before)

# %% [markdown]
# ## Three models in one batch
#
# One engine, and three requests with the same prompt: for the model itself, for what was just learnt, and for the bundled adapter. A request brings its adapter along, and the engine loads what it does not have yet.

# %%
folder = lab.new_folder()
small = {"max_model_len": 128, "kv_cache_memory_bytes": 20_000_000, "num_threads": 1}
llm = LLM("gpt2-tiny", enable_lora=True, max_loras=2, trace=str(folder), **small)
for request in (LoRARequest("mine", 1, str(mine)), LoRARequest("ship", 2, str(ship))):  # load them, one after the other
    llm.generate("The king", SamplingParams(temperature=0, max_tokens=1), lora_request=request)
names = [None, "mine", "ship"]
params = [SamplingParams(temperature=0, max_tokens=24, lora=name) for name in names]
outputs = llm.generate(["The king"] * 3, params)
llm.shutdown()
answers = {name or "gpt2-tiny": output.outputs[0].text for name, output in zip(names, outputs)}
for name, answer in answers.items():
    print(f"{name:9} The king{answer!r}")
lab.claim("the same prompt has three answers", len(set(answers.values())) == 3)
lab.claim("one of them is of the sea", "Wind" in answers["ship"] and "Wind" not in answers["gpt2-tiny"])

# %% [markdown]
# What did a step look like? The event `lora.rows` says how many of its tokens go through each adapter; what is left belongs to the model alone.

# %%
run = read_run(folder)
tokens = {event.step: event.args["num_tokens"] for event in run.named("runner.prepared")}
shown = [
    (e.step, tokens[e.step], *(e.args["rows"].get(name, 0) for name in ("mine", "ship")))
    for e in run.named("lora.rows")
]
lab.table([row for row in shown if row[1] > row[2] + row[3]][:4] or shown[:4], "step", "tokens", "mine", "ship")
added = [(event.args["id"], event.args["adapter"]) for event in run.named("lora.added")]
print("added:", added)
lab.claim("each load has a number of its own", [number for number, _ in added] == [1, 2])

# %% [markdown]
# **Why a number beside the name?** Keys and values depend on the adapter, so a cached block may be found by requests with the same adapter only. If the operator replaces an adapter under its old name, the blocks of its predecessor must not
# be found: a new load is a new number, and the number goes into the blocks' hashes.
#
# **Who may load one** from the folder of a server that runs? Not every client: a path is a way to ask what lies on a machine. So the routes exist only with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`, only what lies below
# `--lora-root` is read, with all links followed first, and of several API keys only the first may ask.

# %% [markdown] tags=["exercise"]
# ## Exercise: rows of several adapters
#
# **Contract.** `adapted(x, y, owners, pairs)`: `x` is an array [rows, inputs], `y` = x W^T is an array [rows, outputs], `owners[i]` is the name of row i's adapter, or None; `pairs[name]` is (A, B, s) with A [rank, inputs], B [outputs, rank]. Return a
# new array: each row of `y` with s · B A x of its own adapter added.
#
# - A row without an adapter stays as it is; so does a row whose adapter has no pair for this layer (its name is not in `pairs`).
# - `y` itself is not changed.
# - Two thin products for each adapter, not for each row, and never the large B A.
#
# The check compares with what is obviously right: for each row by itself, the merged matrix B A.


# %% tags=["exercise"]
def adapted(x: np.ndarray, y: np.ndarray, owners: list, pairs: dict) -> np.ndarray:
    """y, and what each row's adapter adds."""
    raise NotImplementedError


# %% tags=["check"]
def real_adapted(x, y, owners, pairs):
    """Row by row, with the merged matrix."""
    found = y.copy()
    for row, name in enumerate(owners):
        if name in pairs:
            a, b, scale = pairs[name]
            found[row] += scale * (b @ a) @ x[row]
    return found


def case(seed):
    rng = random.Random(seed)

    def integers(*shape):
        return [[rng.randint(-3, 3) for _ in range(shape[1])] for _ in range(shape[0])]

    rows, inputs, width = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 4)
    ranks = {name: rng.randint(1, 3) for name in rng.sample("abc", rng.randint(0, 3))}
    pairs = {name: (integers(rank, inputs), integers(width, rank), rng.randint(1, 3)) for name, rank in ranks.items()}
    return integers(rows, inputs), integers(rows, width), rng.choices([None, *"abc"], k=rows), pairs


def judged(function):
    def call(x, y, owners, pairs):
        given, arrays = np.array(y), {name: (np.array(a), np.array(b), scale) for name, (a, b, scale) in pairs.items()}
        found = np.asarray(function(np.array(x), given, owners, arrays)).tolist()
        return found, "y is as it was" if given.tolist() == y else "y was changed"

    return call


passed = lab.check(judged(adapted), judged(real_adapted), map(case, range(60)))

# %% [markdown]
# That was the warm-up. [Exercise 17](exercises/ex17_adapters/README.md) has the real part, with places for the adapters, and it serves (`stages course start 17`):

# %%
if passed:
    import stage01_cli.tools.course as course

    course.start(17, lab.WORK)  # copies the starter into work/; then course.check(17)
else:
    print("This begins exercise 17 once yours passes.")
