"""Of the stream."""

from __future__ import annotations

from broken import broken

HTTP, BYTES, TEXT = "stage02_server.streaming", "frontend.tokenizer", "detokenizer"
_DECODE = "        return self._decoder.decode(raw)\n"
_TIE = "    return min(found, key=lambda hit: (hit[0], -len(hit[1])), default=None)\n"
_SAFE = "        self.safe = len(self.text) - held_back(self.text[self._searched :], self._stops)\n"
_CUT = "            self.text = self.text[: position + len(stop) if self._include_stop else position]\n"
_COUNT = "            self.num_tokens += 1\n"
_CHECK = "            elif self._stops and (stop := self._check_stop()) is not None:\n                return stop\n"
_SKIP = "            if self._skip_special and self._tokenizer.is_special(token_id):\n                continue\n"
_IDS = "        text_ids = new_token_ids[:-1] if finished_by_token and not self._include_stop else new_token_ids\n"
_FINISH = "        self.safe = len(self.text)\n\n    def next_text"
_LENGTHS = "    for length in range(min(longest - 1, len(text)), 0, -1):\n"

BROKEN = [
    broken("event", "one line break", ('data + b"\\n\\n"', 'data + b"\\n"'), module=HTTP),
    broken("event", "no space", ('b"data: "', 'b"data:"'), module=HTTP),
    broken(
        "waits",
        "half a character is U+FFFD",
        (_DECODE, '        return raw.decode("utf-8", errors="replace")\n'),
        module=BYTES,
    ),
    broken(
        "waits",
        "half a character is left out",
        (_DECODE, '        return raw.decode("utf-8", errors="ignore")\n'),
        module=BYTES,
    ),
    broken("broken", "wrong bytes are left out", ('(errors="replace")', '(errors="ignore")'), module=BYTES),
    broken("first", "the first in the list", (_TIE, "    return found[0] if found else None\n"), module=TEXT),
    broken("first", "the shortest of several", ("(hit[0], -len(hit[1]))", "(hit[0], len(hit[1]))"), module=TEXT),
    broken("first", "before the start too", ("text.find(stop, start)", "text.find(stop)"), module=TEXT),
    broken("held", "one character too few", (_LENGTHS, _LENGTHS.replace("longest - 1", "longest - 2")), module=TEXT),
    broken(
        "held",
        "as long as the longest stop string",
        (_LENGTHS, "    if longest:\n        return min(longest - 1, len(text))\n" + _LENGTHS),
        module=TEXT,
    ),
    broken(
        "held",
        "the shortest end",
        (
            _LENGTHS,
            _LENGTHS.replace("range(min(longest - 1, len(text)), 0, -1)", "range(1, min(longest - 1, len(text)) + 1)"),
        ),
        module=TEXT,
    ),
    broken("cut", "always after it", (_CUT, _CUT.replace(" if self._include_stop else position", "")), module=TEXT),
    broken("cut", "always before it", (_CUT, "            self.text = self.text[:position]\n"), module=TEXT),
    broken("safe", "all of it", (_SAFE, "        self.safe = len(self.text)\n"), module=TEXT),
    broken(
        "safe",
        "nothing before it is certain",
        (_SAFE, "        self.safe = len(self.text) - min(len(self.text), max(map(len, self._stops)) - 1)\n"),
        module=TEXT,
    ),
    broken("special", "always skipped", (_SKIP, _SKIP.replace("self._skip_special and ", "")), module=TEXT),
    broken("special", "never skipped", (_SKIP, ""), module=TEXT),
    broken(
        "minimum",
        "is forgotten",
        (
            "            if self.num_tokens <= self._min_tokens:  # vLLM: no stop string counts in the first min_tokens tokens\n                self._searched = len(self.text)\n            elif",
            "            if",
        ),
        module=TEXT,
    ),
    broken(
        "minimum",
        "one too few",
        (
            "            if self.num_tokens <= self._min_tokens:  #",
            "            if self.num_tokens < self._min_tokens:  #",
        ),
        module=TEXT,
    ),
    broken(
        "at_once",
        "searched after all of them",
        (_CHECK, ""),
        (
            "        if not self._stops or self.num_tokens <= self._min_tokens:\n",
            "        if self._stops and self.num_tokens > self._min_tokens:\n            return self._check_stop()\n        if not self._stops or self.num_tokens <= self._min_tokens:\n",
        ),
        module=TEXT,
    ),
    broken(
        "at_once or cut",
        "counted before",
        (_COUNT, ""),
        (
            "        for token_id in text_ids:\n",
            "        self.num_tokens += len(text_ids)\n        for token_id in text_ids:\n",
        ),
        module=TEXT,
    ),
    broken("ended", "is text", (_IDS, "        text_ids = new_token_ids\n"), module=TEXT),
    broken("ended", "is never text", (_IDS, _IDS.replace(" and not self._include_stop", "")), module=TEXT),
    broken("given", "nothing more at the end", (_FINISH, "        pass\n\n    def next_text"), module=TEXT),
    broken(
        "given",
        "all of it each time",
        ("        start = self._given if delta else 0\n", "        start = 0\n"),
        module=TEXT,
    ),
    broken(
        "linear",
        "all of the text is searched",
        (
            "        hit = find_stop(self.text, self._stops, self._searched)\n",
            "        hit = find_stop(self.text, self._stops, self.first)\n",
        ),
        (
            "                self._searched = len(self.text)\n",
            "                self._searched = self.first = len(self.text)\n",
        ),
        ("        self._searched = 0  # no", "        self.first = 0\n        self._searched = 0  # no"),
        module=TEXT,
    ),
    broken(
        "linear",
        "is a stop string in it",
        (
            _CHECK,
            _CHECK.replace(
                "self._stops and (stop",
                "self._stops and (any(each in self.text for each in self._stops) or True) and (stop",
            ),
        ),
        module=TEXT,
    ),
    broken(
        "linear",
        "all tokens are decoded each time",
        (
            "            self.text += self._stream.push(*self._tokenizer.piece(token_id))\n",
            "            self.ids.append(token_id)\n            stream = self._tokenizer.stream([])\n            whole = ''\n            for each in self.ids:\n                whole += stream.push(*self._tokenizer.piece(each))\n            self.text = whole\n",
        ),
        ("        self._given = 0\n", "        self._given = 0\n        self.ids: list[int] = []\n"),
        module=TEXT,
    ),
    broken(
        "linear",
        "all of it is taken apart for the rest",
        (
            "        start = self._given if delta else 0\n        self._given = self.safe\n        return self.text[start : self.safe]\n",
            "        start = self._given if delta else 0\n        self._given = self.safe\n        return self.text[: self.safe][start:]\n",
        ),
        module=TEXT,
    ),
    broken(
        "linear",
        "a loop over the text",
        (
            "        hit = find_stop(self.text, self._stops, self._searched)\n",
            "        places = [at for at in range(len(self.text)) if at >= self._searched]\n        hit = find_stop(self.text, self._stops, places[0] if places else len(self.text))\n",
        ),
        module=TEXT,
    ),
    broken(
        "linear",
        "all bytes are decoded each time",
        (
            _DECODE,
            "        self._raw += raw\n        text = self._new().decode(self._raw)\n        self._given, start = len(text), self._given\n        return text[start:]\n",
        ),
        (
            '        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")\n',
            "        self._raw, self._given = b'', 0\n\n    def _new(self):\n        class Whole:\n            def decode(self, raw):\n                text = raw.decode('utf-8', errors='replace')\n                return text if codecs.getincrementaldecoder('utf-8')('replace').decode(raw) == text else codecs.getincrementaldecoder('utf-8')('replace').decode(raw)\n\n        return Whole()\n",
        ),
        module=BYTES,
    ),
    broken(
        "linear",
        "joined and decoded each time",
        (
            _DECODE,
            "        self._raw.append(raw)\n        whole = b''.join(self._raw)\n        whole.decode('utf-8', errors='replace')\n        return self._decoder.decode(raw)\n",
        ),
        ("        self._decoder = codecs", "        self._raw = []\n        self._decoder = codecs"),
        module=BYTES,
    ),
]
