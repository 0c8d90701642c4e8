"""Of an engine."""

from __future__ import annotations

from broken import broken

_IS_OVER = "        return answer >= self.request.max_tokens or self.tokens[-1] == self.request.eos_token_id\n"
_TOKENS = "            new[sequence.request.request_id] = sequence.tokens[-1:]\n"
_LATER = "        later = torch.ones(end - start, end, dtype=torch.bool).triu(start + 1)\n"
_LAST = "        self.running = [sequence for sequence in self.running if not sequence.is_over]\n"
_WAITING = "        self.waiting = deque(each for each in self.waiting if each.request.request_id != request_id)\n"
_RUNNING = "        self.running = [each for each in self.running if each.request.request_id != request_id]\n"
_APPEND = "        self.waiting.append(Sequence(request))\n"
_GENERATOR = "        self.generator = torch.Generator().manual_seed(request.seed)\n"
_DRAW = "        return int(torch.multinomial(probabilities, 1, generator=self.generator))\n"
_QUEUE = "        self.waiting: deque[Sequence] = deque()\n"
_NOBODY = "            return {}\n"
_SPLIT = "            mixed = [self.attend(layer, *own) for own in zip(batch, qkv.split(counts))]\n"

BROKEN = [
    broken(
        "greedy",
        "everybody sees everything",
        (_LATER, "        later = torch.zeros(end - start, end, dtype=torch.bool)\n"),
    ),
    broken(
        "greedy",
        "one position further",
        ('self.weights["wpe.weight"][positions]', 'self.weights["wpe.weight"][positions - 1]'),
    ),
    broken(
        "new",
        "all tokens each time",
        (
            _TOKENS,
            "            new[sequence.request.request_id] = sequence.tokens[len(sequence.request.prompt_token_ids) :]\n",
        ),
    ),
    broken(
        "new",
        "a number instead of a list",
        (_TOKENS, "            new[sequence.request.request_id] = sequence.tokens[-1]\n"),
    ),
    broken("length", "one token too many", ("answer >= self.request.max_tokens", "answer > self.request.max_tokens")),
    broken(
        "length",
        "one token too few",
        ("answer >= self.request.max_tokens", "answer >= max(1, self.request.max_tokens - 1)"),
    ),
    broken("eos", "never", (" or self.tokens[-1] == self.request.eos_token_id", "")),
    broken(
        "eos",
        "whatever config.json says",
        ("self.tokens[-1] == self.request.eos_token_id", "self.tokens[-1] in (0, self.request.eos_token_id)"),
    ),
    broken("config", "two layers", ('self.layers, self.heads = self.config["n_layer"]', "self.layers, self.heads = 2")),
    broken("config", "heads of 8", ('self.config["n_head"]\n', 'self.config["n_embd"] // 8\n')),
    broken("all", "no place in the queue", (_QUEUE, "        self.waiting: deque[Sequence] = deque(maxlen=64)\n")),
    broken(
        "all",
        "seats are taken once",
        (_LAST, '        self.taken = getattr(self, "taken", 0) + len(self.running)\n' + _LAST),
        ("len(self.running) < SEATS", 'len(self.running) < SEATS and getattr(self, "taken", 0) < 70'),
    ),
    broken(
        "apart",
        "keys of the first",
        (
            _SPLIT,
            "            shared = [batch[0].num_computed == 0 and batch[0] or each for each in batch]\n            mixed = [self.attend(layer, each, own) for each, own in zip(batch, qkv.split(counts))]\n            mixed = [mixed[0] if each is shared[0] and one.shape == mixed[0].shape else one for each, one in zip(shared, mixed)]\n",
        ),
    ),
    broken(
        "apart",
        "one generator",
        (_QUEUE, _QUEUE + "        self.generator = torch.Generator()\n"),
        (_APPEND, _APPEND + "        self.waiting[-1].generator = self.generator.manual_seed(request.seed)\n"),
    ),
    broken(
        "drawn", "times the temperature", ("(logits / self.request.temperature)", "(logits * self.request.temperature)")
    ),
    broken("drawn", "without the temperature", ("(logits / self.request.temperature)", "logits")),
    broken(
        "drawn",
        "all alike",
        (
            "        probabilities = (logits / self.request.temperature).softmax(-1)\n",
            "        probabilities = torch.ones_like(logits)\n",
        ),
    ),
    broken(
        "seed", "no seed", (_GENERATOR, "        self.generator = torch.Generator()\n        self.generator.seed()\n")
    ),
    broken("seed", "one seed for all", (_GENERATOR, "        self.generator = torch.Generator().manual_seed(3)\n")),
    broken("abort", "not who runs", (_RUNNING, "")),
    broken("abort", "not who waits", (_WAITING, "")),
    broken(
        "abort",
        "an id must be there",
        (
            _RUNNING,
            _RUNNING
            + '        self.aborted = {*getattr(self, "aborted", ())} | {request_id}\n        if request_id == "x":\n            self.running.clear()\n',
        ),
    ),
    broken(
        "frees",
        "a table of all",
        (_APPEND, _APPEND + '        self.__dict__.setdefault("all", {})[request.request_id] = self.waiting[-1]\n'),
    ),
    broken(
        "frees",
        "a list of aborts",
        (_RUNNING, _RUNNING + '        self.__dict__.setdefault("aborted", []).append(request_id + " was aborted")\n'),
    ),
    broken(
        "again",
        "who was there once",
        (
            _APPEND,
            '        if request.request_id not in (seen := self.__dict__.setdefault("seen", [])):\n            self.waiting.append(Sequence(request))\n        self.seen = [*seen, request.request_id][-3:]\n',
        ),
    ),
    broken("idle", "None", (_NOBODY, "            return None  # type: ignore[return-value]\n")),
]
