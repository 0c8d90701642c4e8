# %% [markdown]
# # 17 A kernel in six steps
#
# *Before: [11](11_paged_attention.ipynb) · about 75 minutes with the exercise*
#
# **Question.** Attention of one new token fits into ten lines of Triton. The project's [`_paged_attention`](../stage04_kernels/triton_kernels/paged_attention.py) has two hundred. What are the others for, and how
# do you see, without a GPU, what each of them buys?
#
# Notebook 11 said what paged attention computes. Here you look at what a chip has to do for it: how many numbers are loaded, what a program must hold at once, and how many programs there are. Six kernels, each a
# small change of the one before, each held against plain torch.
#
# | part | here | vLLM |
# |---|---|---|
# | where this leads | [`_paged_attention`](../stage04_kernels/triton_kernels/paged_attention.py) | `v1/attention/ops/triton_unified_attention.py` kernel_unified_attention |
# | how far a kernel may be from its twin | [`TOLERANCES`](../stage04_kernels/lab/tolerances.py) | `tests/kernels` |
# | registers, spills, shared memory without a GPU | [`compile_source`](../stage04_kernels/lab/compile.py) | none |

# %%
import inspect
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import lab
import torch

from stage04_kernels.attention import get_backend

INTERPRETED = not torch.cuda.is_available()
get_backend("triton-interpret" if INTERPRETED else "triton")  # before Triton is imported: its interpreter takes over

import triton
import triton.language as tl

from stage04_kernels.lab.cases import make_metadata
from stage04_kernels.lab.tolerances import TOLERANCES
from stage04_kernels.triton_kernels.paged_attention import paged_attention_triton

torch.manual_seed(0)
torch.set_grad_enabled(False)
DEVICE = "cpu" if INTERPRETED else "cuda"
HEADS, KV_HEADS, DIM = 8, 2, 64  # four query heads share a key/value head
GROUP, SCALE = HEADS // KV_HEADS, DIM**-0.5

# %% [markdown]
# ## The twin, and the counter
#
# A request has some keys and values, and one new token asks: a decode. The twin is a plain version that you can check by reading.
#
# Triton's interpreter runs a kernel with NumPy, one program after the other. Its times say nothing about a GPU, so they are not measured here. What it can tell exactly is what a kernel asks of memory: the counter below adds up the numbers that
# are loaded.


# %%
def twin(query, keys, values):
    """Plain attention of one token: query [HEADS, DIM], keys and values [context, KV_HEADS, DIM]."""
    keys, values = (x.float().repeat_interleave(GROUP, 1).transpose(0, 1) for x in (keys, values))
    weights = torch.softmax((keys @ query.float()[:, :, None])[:, :, 0] * SCALE, 1)  # [HEADS, context]
    return (weights[:, None] @ values)[:, 0].to(query.dtype)


loaded, programs = 0, 0
if INTERPRETED:
    from triton.runtime.interpreter import interpreter_builder

    load = interpreter_builder.create_masked_load

    def counting_load(pointers, mask, *rest):
        """Load, and add up what is not masked away."""
        global loaded
        loaded += int(mask.data.sum())
        return load(pointers, mask, *rest)

    interpreter_builder.create_masked_load = counting_load


def make(context, dtype=torch.float32):
    """Random (query, keys, values) of a request."""
    shapes = (HEADS, DIM), (context, KV_HEADS, DIM), (context, KV_HEADS, DIM)
    return tuple(torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes)


def agrees(attend, contexts, dtypes=(torch.float32, torch.float16)):
    """Is the kernel its twin, for each length and number format, within the table's tolerance?"""
    for dtype in dtypes:
        for context in contexts:
            query, keys, values = make(context, dtype)
            wanted, got, tolerance = twin(query, keys, values), attend(query, keys, values), TOLERANCES[dtype]
            if not torch.allclose(got, wanted, atol=tolerance.atol, rtol=tolerance.rtol):  # NaN is never close
                return False
    return True


measured = {}


def measure(name, attend, num_programs, context=256):
    """Note what a kernel loads for such a context; on a GPU, its time too."""
    global loaded
    case, loaded = make(context), 0
    attend(*case)
    took = "-" if INTERPRETED else f"{1e3 * triton.testing.do_bench(lambda: attend(*case)):.1f} us"
    measured[name] = (name, num_programs, loaded, took)
    lab.table([measured[name]], "step", "programs", "numbers loaded", "time")


# %% [markdown]
# ## 1. One program for each head
#
# A program takes a query head. It loads all keys at once, and then all values.


# %%
@triton.jit
def step_1(
    out_ptr, query_ptr, key_ptr, value_ptr, scale,
    CONTEXT: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    position, dim = tl.arange(0, CONTEXT), tl.arange(0, DIM)
    at = (position[:, None] * KV_HEADS + head // GROUP) * DIM + dim[None, :]  # [CONTEXT, DIM]
    query = tl.load(query_ptr + head * DIM + dim).to(tl.float32)
    scores = tl.sum(tl.load(key_ptr + at).to(tl.float32) * query[None, :], 1) * scale
    weights = tl.exp(scores - tl.max(scores, 0))
    mixed = tl.sum(tl.load(value_ptr + at).to(tl.float32) * weights[:, None], 0)
    tl.store(out_ptr + head * DIM + dim, (mixed / tl.sum(weights, 0)).to(out_ptr.dtype.element_ty))


SIZES = {"KV_HEADS": KV_HEADS, "GROUP": GROUP, "DIM": DIM}


def attend_1(query, keys, values):
    out = torch.empty_like(query)
    step_1[(HEADS,)](out, query, keys, values, SCALE, CONTEXT=len(keys), **SIZES)
    return out


lab.claim("step 1 is its twin, for 16, 64 and 256 keys", agrees(attend_1, (16, 64, 256)))
measure("1 naive", attend_1, HEADS)

# %% [markdown] tags=["predict"]
# > **Predict.** The context has 256 keys and as many values, for each of 2 key/value heads, of 64 numbers each: 65,536 numbers. Step 1 loads how many times as many? And what does it say to a context of 200 tokens?

# %% tags=["predict"]
lab.predict(times_what_there_is=None, context_of_200=None)  # a number; "works", "wrong" or "refused"

# %%
try:
    attend_1(*make(200))
    said = "works"
except Exception as error:
    said = "refused"
    print(str(error)[-80:])
there_is = 2 * 256 * KV_HEADS * DIM
if INTERPRETED:
    lab.claim("each key and value is loaded once for each head of its group", measured["1 naive"][2] // there_is == 4)
lab.compare(times_what_there_is=GROUP, context_of_200=said)

# %% [markdown]
# A tensor in a kernel has a size that is a power of two, and fixed when the kernel is compiled. This kernel would be compiled for 16, 32, 64 keys, and for nothing in between.
#
# ## 2. Masks
#
# So take the next power of two, and say which places are real. A mask is not only for memory that is not ours: a key that is not there must weigh nothing, so its score is minus infinity. (A zero would not do: exp(0) is 1.)


# %%
@triton.jit
def step_2(
    out_ptr, query_ptr, key_ptr, value_ptr, context, scale,
    PADDED: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    position, dim = tl.arange(0, PADDED), tl.arange(0, DIM)
    real = position < context
    at = (position[:, None] * KV_HEADS + head // GROUP) * DIM + dim[None, :]
    query = tl.load(query_ptr + head * DIM + dim).to(tl.float32)
    key = tl.load(key_ptr + at, mask=real[:, None], other=0.0).to(tl.float32)
    value = tl.load(value_ptr + at, mask=real[:, None], other=0.0).to(tl.float32)
    scores = tl.where(real, tl.sum(key * query[None, :], 1) * scale, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 0))
    mixed = tl.sum(value * weights[:, None], 0)
    tl.store(out_ptr + head * DIM + dim, (mixed / tl.sum(weights, 0)).to(out_ptr.dtype.element_ty))


def attend_2(query, keys, values):
    out, padded = torch.empty_like(query), triton.next_power_of_2(len(keys))
    step_2[(HEADS,)](out, query, keys, values, len(keys), SCALE, PADDED=padded, **SIZES)
    return out


LENGTHS = (1, 17, 64, 200)
lab.claim("step 2 is its twin, for any length", agrees(attend_2, LENGTHS))
measure("2 masks", attend_2, HEADS)

# %% [markdown]
# ## 3. Tiles
#
# A program of step 2 holds all keys of a request at once. On a GPU that is registers: 255 for each thread, and what does not fit is *spilled* to memory and read back. You will see in a moment what this comes to. Online softmax
# ([notebook 11](11_paged_attention.ipynb), [exercise 8](exercises/ex08_online_softmax/README.md)) needs no more than a tile of keys, however long the context is.


# %%
@triton.jit
def step_3(
    out_ptr, query_ptr, key_ptr, value_ptr, context, scale,
    TILE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    dim = tl.arange(0, DIM)
    query = tl.load(query_ptr + head * DIM + dim).to(tl.float32)
    largest, total, mixed = float("-inf"), 0.0, tl.zeros([DIM], tl.float32)
    for start in range(0, context, TILE):
        position = start + tl.arange(0, TILE)
        real = position < context
        at = (position[:, None] * KV_HEADS + head // GROUP) * DIM + dim[None, :]
        key = tl.load(key_ptr + at, mask=real[:, None], other=0.0).to(tl.float32)
        value = tl.load(value_ptr + at, mask=real[:, None], other=0.0).to(tl.float32)
        scores = tl.where(real, tl.sum(key * query[None, :], 1) * scale, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 0))
        weights, shrink = tl.exp(scores - now), tl.exp(largest - now)
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink + tl.sum(value * weights[:, None], 0)
        largest = now
    tl.store(out_ptr + head * DIM + dim, (mixed / total).to(out_ptr.dtype.element_ty))


def attend_3(query, keys, values):
    out = torch.empty_like(query)
    step_3[(HEADS,)](out, query, keys, values, len(keys), SCALE, TILE=64, **SIZES)
    return out


lab.claim("step 3 is its twin, for any length", agrees(attend_3, LENGTHS))
measure("3 tiles", attend_3, HEADS)

# %% [markdown]
# ## 4. One program for each group of heads
#
# Four query heads read the same keys, in four programs. Let one program take all four: the scores of a tile become a matrix product, [rows, TILE], and that is what matrix units are for. They take 16 rows at least, so most of
# the rows are nobody's; they cost nothing, since this kernel waits for memory.


# %%
@triton.jit
def step_4(
    out_ptr, query_ptr, key_ptr, value_ptr, context, scale,
    ROWS: tl.constexpr, TILE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    row_at = (kv_head * GROUP + row)[:, None] * DIM + dim[None, :]
    query = tl.load(query_ptr + row_at, mask=row[:, None] < GROUP, other=0.0)
    largest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(0, context, TILE):
        position = start + tl.arange(0, TILE)
        real = position < context
        at = (position[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]
        key = tl.load(key_ptr + at, mask=real[:, None], other=0.0)
        value = tl.load(value_ptr + at, mask=real[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee").to(tl.float32) * scale
        scores = tl.where(real[None, :], scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - now[:, None]), tl.exp(largest - now)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee").to(tl.float32)
        largest = now
    tl.store(out_ptr + row_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=row[:, None] < GROUP)


def attend_4(query, keys, values):
    out = torch.empty_like(query)
    step_4[(KV_HEADS,)](out, query, keys, values, len(keys), SCALE, ROWS=16, TILE=64, **SIZES)
    return out


lab.claim("step 4 is its twin, for any length", agrees(attend_4, LENGTHS))
measure("4 groups", attend_4, KV_HEADS)
if INTERPRETED:
    lab.claim("what there is, and the query, is loaded once", measured["4 groups"][2] == there_is + HEADS * DIM)

# %% [markdown]
# ## 5. The block table
#
# Nothing above minds where a key lies: an address is computed for each. So keys may lie in blocks anywhere, and only the line with the address changes. A tile of 64 keys now comes from four blocks of 16, wherever they are.


# %%
@triton.jit
def step_5(
    out_ptr, query_ptr, key_ptr, value_ptr, table_ptr, context, scale,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    row_at = (kv_head * GROUP + row)[:, None] * DIM + dim[None, :]
    query = tl.load(query_ptr + row_at, mask=row[:, None] < GROUP, other=0.0)
    largest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(0, context, TILE):
        position = start + tl.arange(0, TILE)
        real = position < context
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=real, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        at = (slot[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]
        key = tl.load(key_ptr + at, mask=real[:, None], other=0.0)
        value = tl.load(value_ptr + at, mask=real[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee").to(tl.float32) * scale
        scores = tl.where(real[None, :], scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - now[:, None]), tl.exp(largest - now)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee").to(tl.float32)
        largest = now
    tl.store(out_ptr + row_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=row[:, None] < GROUP)


BLOCK_SIZE = 16


def paged(x):
    """Keys or values in blocks that lie anywhere, and the block table. Every slot that is nobody's holds NaN."""
    count = -(-len(x) // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(len(x))  # the same places for keys and values
    table = torch.randperm(count + 3, generator=generator)[:count].to(DEVICE)
    pool = torch.full((count + 3, BLOCK_SIZE, *x.shape[1:]), torch.nan, dtype=x.dtype, device=DEVICE)
    for index, block in enumerate(table.tolist()):
        piece = x[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        pool[block, : len(piece)] = piece
    return pool, table.int()


def attend_5(query, keys, values):
    out, (key_pool, table), (value_pool, _) = torch.empty_like(query), paged(keys), paged(values)
    step_5[(KV_HEADS,)](
        out, query, key_pool, value_pool, table, len(keys), SCALE, BLOCK_SIZE=BLOCK_SIZE, ROWS=16, TILE=64, **SIZES,
    )  # fmt: skip
    return out


lab.claim("step 5 is its twin, for any length, with NaN in every other slot", agrees(attend_5, LENGTHS))
measure("5 blocks", attend_5, KV_HEADS)

# %% [markdown] tags=["predict"]
# > **Predict.** A single request asks, with a context of 32,000 tokens, on a GPU with 132 multiprocessors. How many of them does step 5 keep busy? And what does the block table add to what is loaded: a hundredth, a tenth, as much again?

# %% tags=["predict"]
lab.predict(busy=None, share_of_the_table=None)

# %%
if INTERPRETED:
    share = (measured["5 blocks"][2] - measured["4 groups"][2]) / measured["4 groups"][2]
    print(f"the table adds {100 * share:.1f} %")
    lab.claim("a hundredth", share < 0.01)
lab.compare(busy=KV_HEADS, share_of_the_table="a hundredth")

# %% [markdown]
# ## 6. Splits
#
# Two. Two programs walk through 32,000 keys, and 130 multiprocessors sit idle. The loop is the only thing that is long, so cut it: each program takes a share of the keys, and leaves its own result with the logarithm of the sum of its weights. The results are
# then weighted by these (Dao et al. 2023, Flash-Decoding). Here the last step is three lines of torch; the project has a second kernel for it.


# %%
@triton.jit
def step_6(
    part_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, table_ptr, context, share, scale,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    kv_head, split = tl.program_id(0), tl.program_id(1)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    head = kv_head * GROUP + row
    query = tl.load(query_ptr + head[:, None] * DIM + dim[None, :], mask=row[:, None] < GROUP, other=0.0)
    largest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    end = tl.minimum(context, (split + 1) * share)
    for start in range(split * share, end, TILE):
        position = start + tl.arange(0, TILE)
        real = position < end
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=real, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        at = (slot[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]
        key = tl.load(key_ptr + at, mask=real[:, None], other=0.0)
        value = tl.load(value_ptr + at, mask=real[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee").to(tl.float32) * scale
        scores = tl.where(real[None, :], scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - now[:, None]), tl.exp(largest - now)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee").to(tl.float32)
        largest = now
    part = split * (KV_HEADS * GROUP) + head
    tl.store(part_ptr + part[:, None] * DIM + dim[None, :], mixed / total[:, None], mask=row[:, None] < GROUP)
    tl.store(lse_ptr + part, largest + tl.log(total), mask=row < GROUP)


def attend_6(query, keys, values, wanted=8):
    (key_pool, table), (value_pool, _) = paged(keys), paged(values)
    share = -(-len(keys) // wanted // 64) * 64 or 64  # whole tiles
    splits = -(-len(keys) // share)  # none without a key: it would divide by 0
    part = torch.empty(splits, HEADS, DIM, device=DEVICE)
    lse = torch.empty(splits, HEADS, device=DEVICE)
    step_6[(KV_HEADS, splits)](
        part, lse, query, key_pool, value_pool, table, len(keys), share, SCALE,
        BLOCK_SIZE=BLOCK_SIZE, ROWS=16, TILE=64, **SIZES,
    )  # fmt: skip
    weights = torch.softmax(lse, 0)  # [splits, HEADS]: what each part weighs among all
    return (weights[:, :, None] * part).sum(0).to(query.dtype)


lab.claim("step 6 is its twin, for any length", agrees(attend_6, (*LENGTHS, 600)))
measure("6 splits", attend_6, KV_HEADS * 4)

# %% [markdown]
# ## What the compiler says
#
# A compiler needs no GPU. It says how many registers a thread takes, what it spills, how much memory the threads of a program share, and whether the matrix unit is used. Here are steps 2 to 6 for an H100, in bfloat16, and
# step 2 for three sizes. (It runs in a process of its own, in which Triton compiles instead of interpreting.)

# %% [markdown] tags=["predict"]
# > **Predict.** How many times as many registers does a thread of step 2 take with 256 keys as with 64? And step 3?

# %% tags=["predict"]
lab.predict(step_2_times=None, step_3_times=None)

# %%
COMPILE = """
import json, sys
from dataclasses import asdict
import kernels
from stage04_kernels.lab.compile import CHIPS, Variant, compile_source
types = {"query_ptr": "x", "key_ptr": "x", "value_ptr": "x", "out_ptr": "x", "part_ptr": "f32", "lse_ptr": "f32", "table_ptr": "i32"}
for name, kernel, constants in json.loads(sys.argv[1]):
    one = getattr(kernels, kernel)
    known = {key: kind for key, kind in types.items() if key in one.arg_names}
    variant = Variant(name, one, constants, known, floats=("scale",))
    print(json.dumps(asdict(compile_source(variant, CHIPS["sm_90"], "aligned", to_the_end=True))))
"""


def compiled(variants):
    """What the compiler says of each (name, kernel, constants)."""
    header = "import triton\nimport triton.language as tl\n\n\n"
    kernels = {kernel: inspect.getsource(globals()[kernel].fn) for _, kernel, _ in variants}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernels.py").write_text(header + "\n\n".join(kernels.values()))
        (Path(folder) / "run.py").write_text(COMPILE)
        environment = {name: value for name, value in lab.os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = lab.os.pathsep.join([folder, *filter(None, sys.path)])
        command = [sys.executable, f"{folder}/run.py", json.dumps(variants)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


DOT = {"ROWS": 16, "TILE": 64, **SIZES}
said = compiled(
    [
        *((f"2, {keys} keys", "step_2", {"PADDED": keys, **SIZES}) for keys in (64, 256, 1024)),
        ("3, any number", "step_3", {"TILE": 64, **SIZES}),
        ("4", "step_4", DOT),
        ("5", "step_5", {"BLOCK_SIZE": 16, **DOT}),
        ("6", "step_6", {"BLOCK_SIZE": 16, **DOT}),
    ]
)
columns = ("variant", "registers", "spilled_bytes", "shared_bytes", "wide_loads", "matrix_ops")
lab.table([[one[name] for name in columns] for one in said], *(name.replace("_", " ") for name in columns))
by_name = {one["variant"]: one for one in said}
assert not [one["error"] for one in said if one["error"]]
growth = by_name["2, 256 keys"]["registers"] / by_name["2, 64 keys"]["registers"]
lab.claim("step 2 takes more registers the more keys there are", growth > 2)
lab.claim("and spills when a thread's 255 are used up", by_name["2, 1024 keys"]["spilled_bytes"] > 0)
lab.claim("a tile takes what it takes, and spills nothing", by_name["3, any number"]["spilled_bytes"] == 0)
lab.claim(
    "the matrix unit comes in with step 4",
    (by_name["3, any number"]["matrix_ops"], by_name["4"]["matrix_ops"] > 0) == (0, True),
)
lab.claim("the block table costs no spill", by_name["5"]["spilled_bytes"] == by_name["6"]["spilled_bytes"] == 0)
lab.compare(step_2_times=growth, step_3_times=1)

# %% [markdown]
# Step 2 takes ever more registers. A thread has 255; what no longer fits is written to memory and read back. Step 3 is compiled
# once, for any context. What each column shows:
#
# - **registers** of a thread: a multiprocessor has 65,536, so kernels that take few have more warps that can wait for memory at the same time;
# - **spilled bytes** of a thread: what did not fit, written to memory and read back. Anything but 0 is a kernel that is badly tiled;
# - **shared bytes** of a program: where tiles wait for the matrix unit (NVIDIA: Tensor Core);
# - **wide loads**: instructions that load 128 bits at once. Where the compiler cannot know that neighbours lie side by side, it loads one by one;
# - **matrix ops**: products in the matrix unit.
#
# All of it together, for a context of 256 tokens:

# %%
lab.table(measured.values(), "step", "programs", "numbers loaded", "time")
if INTERPRETED:
    lab.claim("groups load a quarter of what heads load", measured["4 groups"][2] * 3.9 < measured["3 tiles"][2])
lab.claim("splits turn one request into several programs", measured["6 splits"][1] == 4 * measured["5 blocks"][1])

# %% [markdown]
# And the project's own kernel, on the same request:

# %%
query, keys, values = make(200)
(key_pool, table), (value_pool, _) = paged(keys), paged(values)
metadata = make_metadata([1], [200], [table.tolist()], BLOCK_SIZE)
if INTERPRETED:
    theirs = paged_attention_triton(query[None], torch.stack([key_pool, value_pool]), metadata, SCALE)[0]
    difference = (theirs - attend_6(query, keys, values)).abs().max().item()
    print(f"largest difference to step 6: {difference:.1e}")
    lab.claim("the same, up to rounding", difference < TOLERANCES[torch.float32].atol)

# %% [markdown]
# What it does that step 6 does not: several requests in one launch, prompts of many tokens that must not see what comes after them, a sliding window, rows that see no key at all, heads whose size is no power of two, and a load of the block table that is one
# iteration ahead. These you write in [exercise 7](exercises/ex07_triton_attention/README.md), which a judge checks function by function, and which then serves:
#
# ```python
# import stage01_cli.tools.course as course; course.start(7)
# ```

# %% [markdown] tags=["exercise"]
# ## Exercise: out of the blocks
#
# A warm-up with pointers and masks. Write a kernel (`@triton.jit`, in the same cell) and `my_gather(pool, table, length)`, which launches it and returns the first `length` positions of a request side by side: `[length, num_heads, dim]`.
#
# - `pool` is `[num_blocks, block_size, num_heads, dim]`, `table` the int32 blocks of the request in the order of its positions, `length` at least 1. `dim` is a power of two; `block_size` may be any number.
# - Give the kernel the output with one position more than `length`, all of it -1, so that you see a store too many: it must still be -1 afterwards. Return `out[:length], out[length:]`.
# - A slot that is not the request's holds NaN, and block numbers behind `table`'s last are not yours to load.
#
# The real part is [`gather_context`](../stage04_kernels/backends/reference.py).

# %% tags=["exercise"]
from torch import Tensor


def my_gather(pool: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(the first `length` positions, [length, num_heads, dim]; what lies behind them, [1, num_heads, dim], all -1)."""
    raise NotImplementedError


# %% tags=["check"]
import random

from stage04_kernels.backends.reference import gather_context


def gathered(gather, seed):
    """What it returns for a random request, as plain numbers."""
    rng = random.Random(seed)
    length, size, heads, dim = (
        rng.choice([1, 3, 16, 33]),
        rng.choice([1, 3, 16]),
        rng.choice([1, 2, 3]),
        rng.choice([4, 8]),
    )
    count = -(-length // size)
    table = torch.tensor(rng.sample(range(count + 2), count), dtype=torch.int32, device=DEVICE)
    pool = torch.full((count + 2, size, heads, dim), torch.nan, device=DEVICE)
    for position in range(length):
        places = torch.arange(heads * dim, device=DEVICE).view(heads, dim)
        pool[table[position // size], position % size] = position * 100.0 + places
    found, rest = gather(pool, table, length)
    return found.tolist(), rest.tolist()


def real_gather(pool, table, length):
    """The project's own, and an untouched row."""
    return gather_context(pool, table.tolist(), length), torch.full((1, *pool.shape[2:]), -1.0)


passed = lab.check(
    lambda seed: gathered(my_gather, seed), lambda seed: gathered(real_gather, seed), [(seed,) for seed in range(20)]
)
