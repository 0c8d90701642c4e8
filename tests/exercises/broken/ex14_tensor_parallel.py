"""Of the tensor-parallel layer."""

from __future__ import annotations

from broken import broken

MODEL, WEIGHTS, LAYERS, STATE = "rank_config", "sharded_weights", "parallel_layers", "parallel_state"
_WHY = "    if why := _does_not_divide(shape, tp_size):\n"
_REFUSED = '        raise ConfigError(f"tensor_parallel_size = {tp_size} {why}; possible for this model: {possible}")\n'
_KV = '    if along == "kv_heads" and slices > whole.num_kv_heads:\n'
_NEIGHBOURS = "rank * whole.num_kv_heads // slices, whole.num_kv_heads\n"
_SIZE = "    size = cdiv(length_of(along, whole), slices)\n"
_RANGE = "    return rank * size, (rank + 1) * size\n"
_ENDS = "    ends = [(part * length + start, part * length + min(stop, length)) for part in range(split.parts)]\n"
_ZEROS = "        tensors.append(torch.zeros(missing, *sizes[1:], dtype=stored[0:1].dtype))\n"
_FITS = "    if len(sizes) <= split.dim or sizes[split.dim] != split.parts * length:\n"
_BIAS = "        if own.tp_rank > 0:\n            inner.bias = None\n"
_ROW = "        return all_reduce(self.inner(x))\n"
_LOGITS = "        return all_gather(logits)[:, : self.vocab_size].contiguous() if self.has_vocabulary else logits\n"
_SUM = "    dist.all_reduce(x, group=group)\n"
_PARTS = "    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]\n    dist.all_gather(parts, x, group=group)\n"
_MINE = "    mine, size = dist.get_rank(group), dist.get_world_size(group)\n"


def _refused_if(condition: str) -> tuple[str, str]:
    """check_divides that looks at something else."""
    return _WHY, f'    if {condition}:\n        raise ConfigError("it cannot be cut")\n' + _WHY


def _only_if(condition: str) -> tuple[str, str]:
    """check_divides that does not look at all that matters."""
    return _WHY, f"    if (why := _does_not_divide(shape, tp_size)) and ({condition}):\n"


BROKEN = [
    broken("uneven", "heads are not looked at", _only_if("shape.num_heads % tp_size == 0"), module=MODEL),
    broken("uneven", "the MLP is not looked at", _only_if("shape.intermediate_size % tp_size == 0"), module=MODEL),
    broken("uneven or shared_kv", "whatever there is", _only_if("False"), module=MODEL),
    broken(
        "uneven",
        "more KV heads than workers are not looked at",
        _only_if("shape.num_heads % tp_size or shape.intermediate_size % tp_size or shape.num_kv_heads < tp_size"),
        module=MODEL,
    ),
    broken("uneven", "as a ValueError", (_REFUSED, _REFUSED.replace("ConfigError", "ValueError")), module=MODEL),
    broken("uneven", "an odd size of the heads too", _refused_if("shape.head_dim % tp_size"), module=MODEL),
    broken("shared_kv", "never", _refused_if("shape.num_kv_heads < tp_size"), module=MODEL),
    broken(
        "shared_kv",
        "on more workers than others",
        _only_if("shape.num_heads % tp_size or shape.intermediate_size % tp_size or shape.num_kv_heads > tp_size"),
        module=MODEL,
    ),
    broken(
        "shared_kv",
        "in turn",
        (_NEIGHBOURS, "rank % whole.num_kv_heads, whole.num_kv_heads\n"),
        module=WEIGHTS,
    ),
    broken("shared_kv", "the first for all", (_NEIGHBOURS, "0, whole.num_kv_heads\n"), module=WEIGHTS),
    broken("shared_kv", "all on each worker", (_NEIGHBOURS, "0, 1\n"), module=WEIGHTS),
    broken("shared_kv", "a head in pieces", (_KV, "    if False:\n"), module=WEIGHTS),
    broken(
        "slices",
        "the last takes the rest",
        (_SIZE, _SIZE.replace("cdiv(length_of(along, whole), slices)", "length_of(along, whole) // slices")),
        (_RANGE, "    return rank * size, length_of(along, whole) if rank == slices - 1 else (rank + 1) * size\n"),
        module=WEIGHTS,
    ),
    broken(
        "slices",
        "end with the vocabulary",
        (_RANGE, "    return rank * size, min((rank + 1) * size, length_of(along, whole))\n"),
        module=WEIGHTS,
    ),
    broken("slices", "from the last rank on", (_RANGE, "    rank = slices - 1 - rank\n" + _RANGE), module=WEIGHTS),
    broken(
        "slices",
        "one row is on two workers",
        (_RANGE, "    return max(0, rank * size - 1), (rank + 1) * size\n"),
        module=WEIGHTS,
    ),
    broken(
        "slices",
        "the first ones have one more",
        (
            _RANGE,
            "    rest = length_of(along, whole) % slices\n    begins = [each * (length_of(along, whole) // slices) + min(each, rest) for each in (rank, rank + 1)]\n    return begins[0], begins[1]\n",
        ),
        module=WEIGHTS,
    ),
    broken("slices", "a vocabulary must divide too", _refused_if("shape.vocab_size % tp_size"), module=MODEL),
    broken(
        "parts",
        "in one cut",
        (_ENDS, "    ends = [(split.parts * start, split.parts * min(stop, length))]\n"),
        module=WEIGHTS,
    ),
    broken(
        "parts",
        "the first alone",
        (_ENDS, _ENDS.replace("range(split.parts)", "range(1)")),
        ("    if missing:", "    if missing and split.along == 'vocabulary':"),
        module=WEIGHTS,
    ),
    broken(
        "parts",
        "the last one first",
        (_ENDS, _ENDS.replace("range(split.parts)", "reversed(range(split.parts))")),
        module=WEIGHTS,
    ),
    broken(
        "parts",
        "as if they took turns",
        (
            _ENDS,
            "    ends = [(at, at + 1) for at in range(split.parts * start, split.parts * min(stop, length)) if split.parts > 1] or [(start, min(stop, length))]\n",
        ),
        module=WEIGHTS,
    ),
    broken(
        "padding",
        "there are none",
        ("    if missing:", "    if False:"),
        (" for begin, end in ends if begin < end]", " for begin, end in ends]"),
        module=WEIGHTS,
    ),
    broken("padding", "ones", (_ZEROS, _ZEROS.replace("zeros", "ones")), module=WEIGHTS),
    broken(
        "padding",
        "the last row again",
        (_ZEROS, "        tensors.append(stored[-1:].expand(missing, *sizes[1:]))\n"),
        module=WEIGHTS,
    ),
    broken("padding", "before the others", (_ZEROS, _ZEROS.replace("append(", "insert(0, ")), module=WEIGHTS),
    broken(
        "padding", "of another type", (_ZEROS, _ZEROS.replace("stored[0:1].dtype", "torch.float32")), module=WEIGHTS
    ),
    broken("fits", "is not looked at", (_FITS, "    if len(sizes) <= split.dim:\n"), module=WEIGHTS),
    broken("fits", "one that is too large", (_FITS, _FITS.replace("!=", "<")), module=WEIGHTS),
    broken("fits", "one that is too small", (_FITS, _FITS.replace("!=", ">")), module=WEIGHTS),
    broken(
        "fits",
        "one without the dimension",
        (_FITS, "    if len(sizes) > split.dim and sizes[split.dim] != split.parts * length:\n"),
        module=WEIGHTS,
    ),
    broken(
        "fits", "any number of parts", (_FITS, _FITS.replace("!= split.parts * length", "% length")), module=WEIGHTS
    ),
    broken("fits", "nameless", ('f"{name} has shape', 'f"a tensor has shape'), module=WEIGHTS),
    broken(
        "fits",
        "as a ValueError",
        ('        raise ConfigError(\n            f"{name}', '        raise ValueError(\n            f"{name}'),
        module=WEIGHTS,
    ),
    broken("row", "its own alone", (_ROW, "        return self.inner(x)\n"), module=LAYERS),
    broken(
        "row",
        "their mean",
        (_ROW, "        return all_reduce(self.inner(x)) / _size()\n"),
        (
            "class RowParallelLinear",
            "def _size() -> int:\n    from stage03_engine.core.features.distributed.parallel_state import ranks\n\n    return ranks().tp_size\n\n\nclass RowParallelLinear",
        ),
        module=LAYERS,
    ),
    broken(
        "row", "each of them twice", (_ROW, "        return all_reduce(all_reduce(self.inner(x)))\n"), module=LAYERS
    ),
    broken(
        "packed",
        "the inner layer's matrix",
        (
            _ROW,
            "        y = x @ self.inner.weight.T\n        return all_reduce(y if self.inner.bias is None else y + self.inner.bias)\n",
        ),
        module=LAYERS,
    ),
    broken("row", "side by side", (_ROW, "        return all_gather(self.inner(x))\n"), module=LAYERS),
    broken("row", "the inputs instead", (_ROW, "        return self.inner(all_reduce(x))\n"), module=LAYERS),
    broken("bias_once", "by everybody", (_BIAS, ""), module=LAYERS),
    broken("bias_once", "by nobody", (_BIAS, "        inner.bias = None\n"), module=LAYERS),
    broken(
        "bias_once",
        "by everybody but one",
        (_BIAS, "        if own.tp_rank == 0:\n            inner.bias = None\n"),
        module=LAYERS,
    ),
    broken(
        "bias_once",
        "and once more after the sum",
        (_ROW, "        y = all_reduce(self.inner(x))\n        return y if self.bias is None else y + self.bias\n"),
        (_BIAS, "        self_bias = inner.bias\n" + _BIAS),
        ("        self.inner = inner\n\n", "        self.inner, self.bias = inner, self_bias\n\n"),
        module=LAYERS,
    ),
    broken("sum", "in a tensor of its own", (_SUM, _PARTS + "    x = sum(parts)\n"), module=STATE),
    broken(
        "sum",
        "at the first worker alone",
        (_SUM, _PARTS + "    if dist.get_rank(group) == 0:\n        x.copy_(sum(parts))\n"),
        module=STATE,
    ),
    broken("sum", "its own twice", (_SUM, _PARTS + "    for part in parts:\n        x += part\n"), module=STATE),
    broken("sum", "without the last", (_SUM, _PARTS + "    x.copy_(sum(parts[1:-1], parts[0]))\n"), module=STATE),
    broken("sum", "the mean", (_SUM, _SUM + "    x /= dist.get_world_size(group)\n"), module=STATE),
    broken(
        "sum",
        "in half precision",
        (_SUM, "    half = x.half()\n    dist.all_reduce(half, group=group)\n    x.copy_(half)\n"),
        module=STATE,
    ),
    broken(
        "same_bits",
        "its own first",
        (
            _SUM,
            _PARTS
            + "    for rank, part in enumerate(parts):\n        if rank != dist.get_rank(group):\n            x += part\n",
        ),
        module=STATE,
    ),
    broken(
        "same_bits",
        "its own last",
        (_SUM, _PARTS + "    mine = parts.pop(dist.get_rank(group))\n    x.copy_(sum([*parts, mine]))\n"),
        module=STATE,
    ),
    broken(
        "same_bits",
        "from its own rank on",
        (_SUM, _PARTS + "    mine = dist.get_rank(group)\n    x.copy_(sum(parts[mine:] + parts[:mine]))\n"),
        module=STATE,
    ),
    broken(
        "same_bits",
        "as they come round the ring",
        (
            _SUM,
            _MINE
            + "    letter = x.clone()\n    for _ in range(size - 1):\n        sent = dist.isend(letter, (mine + 1) % size, group=group)\n        received = torch.empty_like(x)\n        dist.recv(received, (mine - 1) % size, group=group)\n        sent.wait()\n        x += received\n        letter = received\n",
        ),
        module=STATE,
    ),
    broken(
        "together",
        "all send before they receive",
        (
            _SUM,
            _MINE
            + "    letter, total = x.clone(), [x.clone()] * size\n    for step in range(1, size):\n        dist.send(letter, (mine + step) % size, group=group)\n        dist.recv(total[mine - step], (mine - step) % size, group=group)\n    x.copy_(sum(total))\n",
        ),
        module=STATE,
    ),
    broken(
        "together",
        "zeros are not sent",
        (_SUM, "    if x.any():\n        dist.all_reduce(x, group=group)\n"),
        module=STATE,
    ),
    broken(
        "together",
        "the last has nothing to send",
        (_SUM, _MINE + "    if mine + 1 < size or size == 1:\n        dist.all_reduce(x, group=group)\n"),
        module=STATE,
    ),
    broken(
        "together",
        "one gathers while the others sum",
        (
            _SUM,
            _MINE
            + "    if mine or size == 1:\n        dist.all_reduce(x, group=group)\n    else:\n        parts = [torch.empty_like(x) for _ in range(size)]\n        dist.all_gather(parts, x, group=group)\n        x.copy_(sum(parts))\n",
        ),
        module=STATE,
    ),
    broken(
        "together",
        "a product of zeros needs no sum",
        (_ROW, "        y = self.inner(x)\n        return all_reduce(y) if y.any() else y\n"),
        module=LAYERS,
    ),
    broken(
        "together",
        "one more after the first",
        (
            _ROW,
            "        y = all_reduce(self.inner(x))\n        if self.first:\n            all_reduce(y.clone())\n        return y\n",
        ),
        ("        self.inner = inner\n\n", "        self.inner, self.first = inner, own.tp_rank == 0\n\n"),
        module=LAYERS,
    ),
    broken("logits", "with the padding", (_LOGITS, _LOGITS.replace("[:, : self.vocab_size]", "")), module=LAYERS),
    broken("logits", "its own alone", (_LOGITS, "        return logits\n"), module=LAYERS),
    broken(
        "logits",
        "a sum",
        (_LOGITS, "        return all_reduce(logits)[:, : self.vocab_size] if self.has_vocabulary else logits\n"),
        module=LAYERS,
    ),
    broken(
        "logits",
        "of a classifier too",
        (_LOGITS, "        return all_gather(logits)[:, : self.vocab_size].contiguous()\n"),
        module=LAYERS,
    ),
    broken("logits", "in pieces", (_LOGITS, _LOGITS.replace(".contiguous()", "")), module=LAYERS),
    broken(
        "logits",
        "the padding of each slice",
        (
            _LOGITS,
            "        return all_gather(logits[:, : self.vocab_size // 2])[:, : self.vocab_size].contiguous() if self.has_vocabulary else logits\n",
        ),
        module=LAYERS,
    ),
    broken(
        "whole",
        "products travel in bfloat16",
        (_ROW, "        return all_reduce(self.inner(x).bfloat16()).to(x.dtype)\n"),
        module=LAYERS,
    ),
    broken(
        "whole",
        "inputs in half precision",
        (_ROW, "        return all_reduce(self.inner(x.half().to(x.dtype)))\n"),
        module=LAYERS,
    ),
]
