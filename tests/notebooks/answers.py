"""Answers to the notebooks' exercises, to prove that each check judges: a right one, made of the real part, and a wrong one.

Each is the code of a cell that the reader could have written. The wrong ones are mistakes that people make.
"""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """A right answer, a wrong one, and what the wrong one gets wrong."""

    right: str
    wrong: str
    mistake: str


ANSWERS = {
    "00_the_whole_walk": Answer(
        "def merge(lanes):\n    return list(causal_order(lanes))",
        "def merge(lanes):\n    return sorted((e for lane in lanes for e in lane), key=lambda e: e.ts)",
        "it trusts clocks that disagree",
    ),
    "01_cli": Answer(
        "resolve = real",
        """
def resolve(settings, given, environ):
    return real(settings, {n: v for n, v in given.items() if s_variable(n) not in environ}, environ)


def s_variable(name):
    return "STAGES_" + name.upper()
""",
        "the environment wins over the command line",
    ),
    "02_serve": Answer(
        "def launch(tag, flag, variable, headless, count):\n"
        "    return choose(tag, flag, variable)[0], REAL_BRANCH[headless, count]",
        "def launch(tag, flag, variable, headless, count):\n"
        "    model = choose(tag, flag, variable)[0]\n"
        "    return model, 'run_headless' if headless else REAL_BRANCH[False, max(count, 1)]",
        "no API server at all is taken for one",
    ),
    "03_api_server": Answer(
        "bind = create_server_socket",
        """
def bind(host, port):
    made = create_server_socket(host, port)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made
""",
        "two servers may share the port until one listens",
    ),
    "04_async_llm": Answer(
        "held_back = real_part.held_back",
        "def held_back(text, stops):\n    return max([0, *(len(stop) - 1 for stop in stops)])",
        "it holds back as much as the longest stop string could need",
    ),
    "05_engine_core": Answer(
        "num_blocks = decide_num_blocks",
        """
def num_blocks(config, memory):
    cache = config.cache_config
    if cache.num_gpu_blocks_override is None and cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes // memory.kv_block_bytes()
    return decide_num_blocks(config, memory)
""",
        "with a given size, nobody looks whether one request fits",
    ),
    "06_request": Answer(
        "blame = real_blame",
        """
def blame(fields):
    if fields.get("top_p") == 0.0:
        return real_blame({**fields, "top_p": 1.0})
    return real_blame(fields)
""",
        "top_p may be 0",
    ),
    "07_into_the_engine": Answer(
        "MyCollector = RequestOutputCollector",
        """
class MyCollector(RequestOutputCollector):
    def put(self, output):
        if isinstance(self._output, Exception):
            self._output = None
        super().put(output)
""",
        "what comes after an exception replaces it",
    ),
    "08_execution": Answer(
        "my_inputs = real_inputs",
        """
def my_inputs(batch, block_size):
    ids, positions, slots, _ = real_inputs(batch, block_size)
    ends = [sum(one[2] for one in batch[: i + 1]) - 1 for i in range(len(batch))]
    return ids, positions, slots, ends
""",
        "it samples for requests that have not caught up",
    ),
    "09_response": Answer(
        "my_deltas = real_deltas",
        """
def my_deltas(pieces, stops):
    deltas, stop = real_deltas(pieces, stops)
    return (deltas, stop) if stop else ([piece.decode(errors="replace") for piece in pieces] + [""], None)
""",
        "each token is decoded alone",
    ),
    "10_scheduler_lab": Answer(
        "class MyScheduler(Scheduler):\n    pass",
        """
class MyScheduler(Scheduler):
    def _schedule_waiting(self, output, budget):
        if len(self.running) < self.config.max_num_seqs - 1 or not self.running:
            super()._schedule_waiting(output, budget)
""",
        "one seat stays empty",
    ),
    "11_paged_attention": Answer(
        "my_paged_attention = paged_attention_torch",
        """
def my_paged_attention(query, kv_cache, metadata, scale, window=None):
    return paged_attention_torch(query, kv_cache, metadata, scale)
""",
        "the window is forgotten",
    ),
    "12_debug_with_a_trace": Answer(
        "lost_blocks = real_lost_blocks",
        """
def lost_blocks(events):
    return [(ref, blocks[:1]) for ref, blocks in real_lost_blocks(events)]
""",
        "of several lost blocks it names one",
    ),
    "13_more_than_one": Answer(
        """
def go_on(sent, second_run):
    missing = list(sent)
    for step in second_run:
        known, missing = missing[: len(step)], missing[len(step) :]
        if step[: len(known)] != known:
            raise Differs
        if step[len(known) :]:
            yield step[len(known) :]
    if missing:
        raise Differs
""",
        """
def go_on(sent, second_run):
    skip = len(sent)
    for step in second_run:
        if step[skip:]:
            yield step[skip:]
        skip = max(0, skip - len(step))
    if skip:
        raise Differs
""",
        "what comes again is skipped, and not compared",
    ),
    "14_make_it_faster": Answer(
        "my_metrics = real_metrics",
        """
def my_metrics(requests, duration, ttft_ms, tpot_ms):
    rate, ttft, _, goodput = real_metrics(requests, duration, ttft_ms, tpot_ms)
    tpots = [1000 * (times[-1] - start) / len(times) for start, times in requests]
    return rate, ttft, statistics.median(tpots), goodput
""",
        "the time per output token counts the first one too",
    ),
    "15_check_a_document": Answer(
        """
def napkin(shape, requests, tokens, size):
    h = shape.hidden_size
    layer = 4 * (h * h + h) + (h * 4 * h + 4 * h) + (4 * h * h + h) + 4 * h
    weights = (shape.vocab_size + shape.max_position_embeddings) * h + shape.num_layers * layer + 2 * h
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return weights * size, per_token * size * requests * -(-tokens // 16) * 16
""",
        """
def napkin(shape, requests, tokens, size):
    weights, cache = real(next(name for name, one in SHAPES.items() if one == shape), requests, 1024, size)
    return weights, cache * tokens // 1024
""",
        "it forgets that a block is whole",
    ),
    "16_napkin": Answer(
        """
def my_users(model, chip, load):
    room = chip.memory * on_paper.MEMORY_SHARE - on_paper.weight_bytes(model, load)
    prefill = on_paper.prefill_seconds(model, chip, load) / load.answer
    reading = on_paper.read_context_seconds(model, chip, load) + prefill
    walls = {
        "memory": room / ((load.prompt + load.answer) * on_paper.kv_bytes_per_token(model, load)),
        "bandwidth": (load.tpot - on_paper.read_weights_seconds(model, chip, load)) / reading,
        "arithmetic": load.tpot / (on_paper.compute_token_seconds(model, chip, load) + prefill),
    }
    users = {name: max(0, int(number)) for name, number in walls.items()}
    wall = min(users, key=users.get)
    return users[wall], wall
""",
        """
def my_users(model, chip, load):
    return real_users(model, chip, replace(load, prompt=1, answer=load.prompt + load.answer - 1))
""",
        "nobody waits for a prompt",
    ),
    "17_a_kernel_in_six_steps": Answer(
        """
@triton.jit
def gather_kernel(out_ptr, pool_ptr, table_ptr, length, size, row, PADDED: tl.constexpr, TILE: tl.constexpr):
    position, place = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, PADDED)
    real = position < length
    block = tl.load(table_ptr + position // size, mask=real, other=0)
    both = real[:, None] & (place[None, :] < row)
    slot = block * size + position % size
    found = tl.load(pool_ptr + slot[:, None] * row + place[None, :], mask=both, other=0.0)
    tl.store(out_ptr + position[:, None] * row + place[None, :], found, mask=both)


def my_gather(pool, table, length):
    out, row = torch.full((length + 1, *pool.shape[2:]), -1.0), pool[0, 0].numel()
    sizes = {"PADDED": triton.next_power_of_2(row), "TILE": 16}
    gather_kernel[(-(-length // 16),)](out, pool, table, length, pool.shape[1], row, **sizes)
    return out[:length], out[length:]
""",
        """
def my_gather(pool, table, length):
    found, rest = real_gather(pool, table.sort().values, length)
    return found, rest
""",
        "it takes the blocks in the order of memory",
    ),
    "18_metrics": Answer(
        "quantile = alarms.quantile",
        """
def quantile(q, buckets):
    finite = [(high, upto) for high, upto in buckets if not math.isinf(high)]
    return alarms.quantile(q, [*finite, (math.inf, finite[-1][1])])
""",
        "what is beyond the last finite bound is left out",
    ),
    "19_lifecycle": Answer(
        "probe = real_probe",
        """
def probe(ready, errored, draining, ended, path):
    state, refused = real_probe(ready, errored, draining, ended, path)
    return ("starting" if not ready and ended is None else state), refused
""",
        "an engine that died before it was ready is still awaited",
    ),
    "20_structured_output": Answer(
        "choice_mask = real_mask",
        """
def choice_mask(choices, so_far, tokens, end):
    open_ones = [choice for choice in choices if choice != so_far]
    return real_mask(open_ones, so_far, tokens, end) if any(c.startswith(so_far) for c in open_ones) else b""
""",
        "where the text is a choice already, the end is not allowed",
    ),
    "21_security": Answer(
        "guard = real_guard",
        """
def guard(header, keys, target):
    return real_guard(header, keys, target)[0], "".join(c if ord(c) > 31 else repr(c)[1:-1] for c in target)
""",
        "only the old control characters are escaped",
    ),
    "22_adapters": Answer(
        """
def adapted(x, y, owners, pairs):
    found = y.copy()
    for name in pairs.keys() & set(owners):
        rows = [row for row, owner in enumerate(owners) if owner == name]
        a, b, scale = pairs[name]
        found[rows] += scale * (x[rows] @ a.T) @ b.T
    return found
""",
        """
def adapted(x, y, owners, pairs):
    for name, (a, b, scale) in pairs.items():
        rows = [row for row, owner in enumerate(owners) if owner == name]
        y[rows] += scale * (x[rows] @ a.T) @ b.T
    return y
""",
        "it writes into what it was given",
    ),
    "24_compiled_steps": Answer(
        """
def passes(operations):
    made, has_row, open_pass = [], False, False
    for name, kind in operations:
        if kind == "product" or not open_pass or (kind == "row" and has_row):
            made.append([])
            has_row = False
        made[-1].append(name)
        has_row, open_pass = has_row or kind == "row", kind != "product"
    return made
""",
        """
def passes(operations):
    made, open_pass = [], False
    for name, kind in operations:
        if kind == "product" or not open_pass:
            made.append([])
        made[-1].append(name)
        open_pass = kind != "product"
    return made
""",
        "two norms share a pass",
    ),
    "25_pictures": Answer(
        """
def positions(parts):
    found, following = [], 0
    for part in parts:
        if isinstance(part, int):
            found += [(following + i,) * 3 for i in range(part)]
            following += part
        else:
            rows, columns = part
            found += [(following, following + row, following + column) for row in range(rows) for column in range(columns)]
            following += max(part)
    return found, following
""",
        """
def positions(parts):
    found, following = [], 0
    for part in parts:
        if isinstance(part, int):
            found += [(following + i,) * 3 for i in range(part)]
            following += part
        else:
            rows, columns = part
            found += [(following, following + row, following + column) for row in range(rows) for column in range(columns)]
            following += columns
    return found, following
""",
        "the text goes on after the width, also behind a picture that is higher than wide",
    ),
    "23_from_zero": Answer(
        """
def generate(guess, prompt, most, end):
    made = []
    for _ in range(most):
        chances = guess(prompt + made)
        best = max(range(len(chances)), key=lambda token: chances[token])
        made.append(best)
        if best == end:
            break
    return made
""",
        """
def generate(guess, prompt, most, end):
    made = []
    for _ in range(most):
        chances = guess(prompt + made)
        best = chances.index(max(chances))
        if best == end:
            break
        made.append(best)
    return made
""",
        "the token that ends the text is left out",
    ),
}
