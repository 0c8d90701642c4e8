# %% [markdown]
# # 24 Compiled steps: what a compiler makes of a model
#
# *Before: [08](08_execution.ipynb), [14](14_make_it_faster.ipynb) · about 45 minutes with the exercise*
#
# **Question.** A layer is a dozen operations, and each reads what the one before has just written. What does `torch.compile` make of them, what does it buy, and what does it cost when it has to stop half-way?
#
# | part | here | vLLM |
# |---|---|---|
# | flags and modes | [`compilation_of`](../stage03_engine/core/features/compilation/config_json.py) | `config/compilation.py` CompilationConfig |
# | the model as graphs | [`CompiledModelHook`](../stage03_engine/core/features/compilation/compiled.py) | `compilation/decorators.py` support_torch_compile |
# | how long the last start took | [`recall`](../stage03_engine/core/features/compilation/measured.py) | none |
# | decode steps, recorded whole | [`DecodeGraphs`](../stage03_engine/core/features/cuda_graphs/cuda_graphs.py) | `v1/worker/gpu_model_runner.py` capture_model |
# | any steps, in pieces | [`PiecewiseGraphs`](../stage03_engine/core/features/cuda_graphs/piecewise.py) | `compilation/piecewise_backend.py` |
# | which step takes which | [`CudaGraphHook`](../stage03_engine/core/features/cuda_graphs/graph_hook.py) | `v1/cudagraph_dispatcher.py` CudagraphDispatcher |
# | the same by hand, on a CPU | [the native functions](../stage04_kernels/README.md) | `csrc/cpu` |

# %%
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that waits lets others run; read when torch is imported
import lab
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.cuda_graphs.piecewise import PiecewiseGraphs
from stage03_engine.core.features.cuda_graphs.simulated import GraphError, SimulatedGraphs, operations_of
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

torch.set_num_threads(1)
SMALL = {
    "max_model_len": 128, "kv_cache_memory_bytes": 20_000_000, "num_threads": 1, "device": "cpu", "dtype": "float32",
}  # fmt: skip


def median_us(call, repeats=200):
    """Microseconds of a call."""
    with torch.inference_mode():
        for _ in range(10):
            call()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


# %% [markdown]
# ## The graph before
#
# `torch.compile` runs a function once with tensors that have shapes and no numbers, and writes down each operation. That list is the *graph*. A backend gets it and returns something to call instead. Here is a backend that looks at
# the graph and changes nothing, and the half of a layer that comes after attention: a sum, a norm, a product, an activation, a product.


# %%
def half_a_layer(x, attended, weight, bias, wide, narrow):
    x = x + attended
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)
    inner = torch.nn.functional.gelu(normed @ wide, approximate="tanh")
    return x + inner @ narrow


graphs = []


def look(graph, inputs):
    graphs.append(graph)
    return graph


generator = torch.Generator().manual_seed(0)
sizes = ((4, 256), (4, 256), (256,), (256,), (256, 1024), (1024, 256))
tensors = [torch.randn(size, generator=generator) / size[-1] ** 0.5 for size in sizes]
torch._dynamo.reset()
torch.compile(half_a_layer, backend=look)(*tensors)
before = [node for node in graphs[0].graph.nodes if node.op == "call_function"]
for node in before:
    print(f"{node.name:12} <- {', '.join(arg.name for arg in node.all_input_nodes)}")

# %% [markdown] tags=["predict"]
# > **Predict.** Each of these operations reads its inputs from memory and writes its result there. Inductor, torch's own backend, may put several of them into one loop, but leaves matrix products to a library.
# > Into how many loops of its own does it put the rest?

# %% tags=["predict"]
lab.predict(loops_of_inductor=None)

# %% [markdown]
# ## The graph after
#
# Inductor writes C++ and compiles it. What it has written is a Python function that calls loops (`cpp_fused_...`, named after what is in them) and products (`extern_kernels.mm`).

# %%
torch._dynamo.reset()
compiled = torch.compile(half_a_layer)
with torch.inference_mode():
    result, (code, *_) = run_and_get_code(compiled, *tensors)
    expected = half_a_layer(*tensors)
body = code.partition("def call(")[2]
calls = [
    line.strip().partition("(")[0] for line in body.splitlines() if "cpp_fused" in line or "extern_kernels" in line
]
calls = [call for call in calls if call.startswith(("cpp_fused", "extern_kernels"))]
for call in calls:
    print(call)
loops = [call for call in calls if call.startswith("cpp_fused")]
lab.say(f"{len(before)} operations have become {len(calls)} calls, of which {len(loops)} are loops")
lab.claim("the results agree", torch.allclose(result, expected, atol=1e-5))
lab.claim("there are fewer passes over memory than operations", len(calls) < len(before))
lab.claim("products are left to a library", sum(call.startswith("extern") for call in calls) == 2)
lab.compare(loops_of_inductor=len(loops))

# %%
plain_us, compiled_us = median_us(lambda: half_a_layer(*tensors)), median_us(lambda: compiled(*tensors))
lab.say(f"half a layer took {plain_us:.0f} us as it is, and {compiled_us:.0f} us compiled")

# %% [markdown]
# For four rows the products read all weights and nearly all of the time is theirs: what a compiler can save is little. It saves most where results are large and products are few, and on a GPU, where each operation is a launch.

# %% [markdown]
# ## What stops it
#
# Whatever the compiler cannot look into breaks the graph: what was noted so far becomes one graph, Python does the rest, and a new graph begins. Each piece looks again whether its inputs are what it was compiled for (its *guards*), and no loop reaches over the gap.


# %%
def chain(breaks):
    """Twelve small operations in a row, written out; after so many of them the graph breaks."""
    lines = [
        f"    x = torch.sin(x) * 1.5{'; torch._dynamo.graph_break()' * (number < breaks)}\n" for number in range(12)
    ]
    names = {"torch": torch}
    exec("def call(x):\n" + "".join(lines) + "    return x\n", names)
    return names["call"]


rows, x = [], torch.randn(64)
for breaks in (0, 1, 4, 11):
    torch._dynamo.reset()
    counters.clear()
    broken = torch.compile(chain(breaks), backend="eager")
    microseconds = median_us(lambda broken=broken: broken(x))
    rows.append((breaks, counters["stats"]["unique_graphs"], round(microseconds, 1)))
lab.table(rows, "breaks", "graphs", "us a call")
lab.claim("each break makes one more graph", all(made == breaks + 1 for breaks, made, _ in rows))
lab.claim("pieces cost more than a whole", rows[-1][2] > rows[0][2], measured=True)
lab.say(f"here a break cost {(rows[-1][2] - rows[0][2]) / 11:.1f} us a call")

# %% [markdown]
# ## The engine's modes
#
# Attention is what stops it in a model: its work depends on numbers in the metadata. Mode 1 leaves it as it is, so every layer breaks the graph. Mode 3 makes attention *one operation* of which the compiler knows the shapes alone: a whole step is one graph. (`-O0` is
# mode 0; `-O1` to `-O3` are mode 3 on a GPU, and record more and more of a step there, as the end of this page shows; they change nothing on a CPU.)

# %% [markdown] tags=["predict"]
# > **Predict.** A graph for one token and one for more, since a size of 1 is compiled apart. How many graphs does mode 3 make of a GPT-2 with two layers, and how many does mode 1 make of it: more than its layers, or fewer?

# %% tags=["predict"]
lab.predict(graphs_of_mode_3=None, mode_1_makes_more_than_layers=None)


# %%
LAYERS = 2  # so that Inductor takes seconds; a model of random numbers will do
SHORT = {"hf_overrides": {"n_layer": LAYERS}, "load_format": "dummy"}


def start(mode, backend="eager", **more):
    """(seconds until it can serve, what was compiled, tokens of an answer, milliseconds of a step)"""
    torch._dynamo.reset()
    folder = lab.new_folder()
    config = {"mode": mode, "backend": backend, **more}
    began = time.perf_counter()
    llm = LLM("gpt2-tiny", **SMALL, **SHORT, linear_backend="torch", attention_backend="torch", trace=str(folder), compilation_config=config)  # fmt: skip
    seconds = time.perf_counter() - began
    [output] = llm.generate(["To be, or"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    llm.shutdown()
    run = read_run(folder)
    spans = list(run.named("model.forward"))
    steps = [end.ts - begin.ts for begin, end in zip(spans[::2], spans[1::2])]
    made = [event.args for event in run.named("model.compiled")]
    return seconds, made[0] if made else {}, output.outputs[0].token_ids, statistics.median(steps) / 1e6


inductor_folder = lab.new_folder()
STARTS = {
    "0: as torch runs it": (0,),
    "1: pieces, eager": (1,),
    "3: whole, eager": (3,),
    "3: whole, inductor": (3, "inductor"),
    "3: whole, inductor, again": (3, "inductor"),
}
found = {
    name: start(*how, **({"cache_dir": str(inductor_folder)} if "inductor" in how else {}))
    for name, how in STARTS.items()
}
lab.table(
    [(name, round(s, 1), made.get("graphs", 0), made.get("breaks", 0), round(ms, 2)) for name, (s, made, _, ms) in found.items()],
    "mode", "start, s", "graphs", "breaks", "a step, ms",
)  # fmt: skip
whole, pieces = found["3: whole, eager"][1], found["1: pieces, eager"][1]
lab.claim("all answer with the same tokens", len({tuple(tokens) for _, _, tokens, _ in found.values()}) == 1)
lab.claim("mode 3 has no break", whole["breaks"] == 0 and pieces["breaks"] > 0)
lab.compare(graphs_of_mode_3=whole["graphs"], mode_1_makes_more_than_layers=pieces["graphs"] > LAYERS)

# %%
cold, warm = (found[name][0] for name in ("3: whole, inductor", "3: whole, inductor, again"))
lab.say(f"the first start with Inductor took {cold:.1f} s, the next {warm:.1f} s: what was compiled lies in its folder")
lab.claim("the second start is shorter", warm < cold, measured=True)
gained = found["0: as torch runs it"][3] / found["3: whole, inductor"][3]
lab.say(f"a step of Inductor's is {gained:.2f} times as fast as torch's own, on this machine")

# %% [markdown]
# `eager` and `aot_eager` change no operation: what they cost or win is what noting and guarding costs. So they are the control of the experiment. `serve --dry-run` says what would be compiled, and how long it took the last time; before the first start it cannot know.
#
# ## The pieces of a step
#
# On a GPU a launch costs the processor as much as a small kernel takes. A *CUDA graph* repeats launches, with one call, on the memory that they had when they were recorded. A decode step is recorded whole, with the sampler in it. A mixed step cannot be, because its attention is cut
# differently each time. So it is cut at attention: what lies between two attentions depends on the number of rows alone, and is recorded for some numbers; attention runs in between. There need be no GPU to look at this: what follows records on a CPU, under the same rules.

# %% [markdown] tags=["predict"]
# > **Predict.** Into how many pieces is a step of these two layers cut?

# %% tags=["predict"]
lab.predict(pieces_of_a_step=None)

# %%
PLAIN = {"linear_backend": "torch", "attention_backend": "torch"}
runner = ModelRunner(EngineArgs.from_kwargs(model="gpt2-tiny", **SMALL, **SHORT, **PLAIN), torch.device("cpu"))
runner.load_model()
with torch.inference_mode():
    caches = runner.new_kv_caches(2, runner.device)
    pieces = PiecewiseGraphs(runner.model, caches, [4], runner.device, SimulatedGraphs())
graphs_of_step = [operations_of(replay) for replay in pieces.replays(4)]
lab.table(
    [(number, len(names), " ".join(names)) for number, names in enumerate(graphs_of_step)],
    "piece",
    "operations",
    "what it repeats",
)
lab.claim("there is one before, between and after the attentions", len(graphs_of_step) == LAYERS + 1)
lab.claim(
    "no piece holds a softmax: that is attention's",
    not any("softmax" in name for names in graphs_of_step for name in names),
)
lab.claim(
    "each but the last ends by copying queries, keys and values side by side",
    all(names[-1] == "cat" for names in graphs_of_step[:-1]),
)
lab.compare(pieces_of_a_step=len(graphs_of_step))

# %% [markdown]
# A recording knows addresses, and nothing else. Whatever changes from step to step must be copied to where it was; who puts another tensor in its place goes on computing with the old numbers. A GPU says nothing then. These rules do:

# %%
fixed, pieces._input_ids = pieces._input_ids, torch.ones(4, dtype=torch.int64)  # put in its place, not copied into it
del fixed
try:
    pieces.replays(4)[0]()
    said = "nothing"
except GraphError as error:
    said = str(error)
lab.say(f"the first piece says: {said}")
lab.claim("it does not go on with old numbers", "nobody keeps" in said)

# %% [markdown]
# And in the engine: a prompt's step and a decode step are padded to the next recorded size, larger ones run as they are. `graphs.dispatched` says which, and why.

# %%
folder = lab.new_folder()
how = {"cudagraph_simulate": True, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 8]}
with LLM("gpt2-tiny", **SMALL, **SHORT, trace=str(folder), compilation_config=how) as llm:
    outputs = llm.generate(
        ["To be, or", "To be, or not to be, that is"], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    )
with LLM("gpt2-tiny", **SMALL, **SHORT, **PLAIN) as llm:
    expected = llm.generate(
        ["To be, or", "To be, or not to be, that is"], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    )
taken = [event.args for event in read_run(folder).named("graphs.dispatched")]
lab.table(
    [(one["num_tokens"], one["mode"], one["size"] or "-", one["why"]) for one in taken],
    "tokens",
    "recording",
    "padded to",
    "why",
)
lab.claim(
    "the tokens are those of steps that run",
    [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in expected],
)
lab.claim(
    "each step is padded to the next size, or runs",
    all(one["size"] == (0 if one["num_tokens"] > 8 else 1 if one["num_tokens"] == 1 else 8) for one in taken),
)

# %% [markdown]
# What this cannot show is speed, and what a GPU's allocator does with memory that graphs share. On a GPU, `python -m stage03_engine.core.features.cuda_graphs.confirm` measures every mode.

# %% [markdown] tags=["exercise"]
# ## Exercise: which operations share a pass
#
# **Contract.** `passes(operations)`: a list of (name, kind), in the order in which they run; each reads the result of the one before. Return a list of lists of names: the passes over memory, in order.
#
# - A `"product"` is a pass of its own: a library does it.
# - `"pointwise"` operations (each number needs the same place of its input) share a pass with their neighbours.
# - A `"row"` operation, such as a norm, must see a whole row before it gives any number, so a pass has one at most: a second one begins a new pass. Pointwise operations before and after it may share its pass.
# - No pass is empty.


# %% tags=["exercise"]
def passes(operations: list) -> list:
    """Names, by pass."""
    raise NotImplementedError


# %% tags=["check"]
def real_passes(operations):
    """One list of names for each pass."""
    found, kinds = [], []
    for name, kind in operations:
        joins = kinds and kind != "product" and "product" not in kinds and not (kind == "row" and "row" in kinds)
        if not joins:
            found.append([])
            kinds = []
        found[-1].append(name)
        kinds.append(kind)
    return found


def cases():
    import itertools

    kinds = ("pointwise", "row", "product")
    for length in range(5):
        for chosen in itertools.product(kinds, repeat=length):
            yield ([(f"{kind}{place}", kind) for place, kind in enumerate(chosen)],)


passed = lab.check(passes, real_passes, cases())

# %% [markdown]
# Now look at Inductor's calls above once more: which of its loops hold a norm, and what came along?
