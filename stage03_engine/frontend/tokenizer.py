"""The tokenizer of the front end: text <-> token ids, and the bytes of each token.

Byte-level vocabularies (GPT-2, Llama 3, Qwen) are built in; another decoder is loaded by its lazy name. This needs only
`tokenizers`: importing transformers would bring torch into the API process (hundreds of megabytes, seconds).
Source: vllm/tokenizers/registry.py (init_tokenizer_from_configs in 0.11).
"""

from __future__ import annotations

import codecs
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.hf_config import read_json
from stage03_engine.model_path import find_tokenizer
from stage03_engine.plugins import asked, find, wanted
from stagetrace import trace

PIECES = 2**15  # tokens that are remembered


@lru_cache(maxsize=1)
def byte_of_symbol() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character; this maps it back (GPT-2's bytes_to_unicode).

    Printable Latin-1 bytes stand for themselves; the other 68 are shifted to code points from 256 up.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + n): byte for n, byte in enumerate(shifted)})
    return table


class TokenStream(Protocol):
    """Tokens in, text out, as soon as it is certain."""

    def push(self, token: str, raw: bytes) -> str:
        """The text that `token` adds; `raw` are its bytes. An empty token is an id outside the vocabulary."""


class ByteLevelStream:
    """Bytes wait until they form whole characters.

    Python's incremental decoder keeps at most three bytes of an unfinished character, and turns bytes that can never become
    valid into U+FFFD at once, as decoding the whole would. vLLM uses `DecodeStream` of the tokenizers library, which gives the
    same text for valid bytes; it holds back any text that ends in U+FFFD until a valid character follows.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: str, raw: bytes) -> str:
        """See TokenStream."""
        return self._decoder.decode(raw)


def _other_decoder(backend: Backend) -> Any:
    """The decoder that tokenizer.json names; None for a byte-level vocabulary, which needs nothing else."""
    state: Any = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": None}
    steps: list[Any] = state["decoders"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return None
    for key in ("decoder", "library_decoder"):
        if (read := find("engine", key)) is not None and (decoder := read(steps, backend)) is not None:
            return decoder
    raise ConfigError(f"this kind of tokenizer is not supported: its decoder is {[step['type'] for step in steps]}")


class Tokenizer:
    """Text <-> token ids.

    vocab_size: number of token ids; max_token_bytes: no token stands for more bytes, or for more characters of a prompt;
    eos_token_id: the id that ends a text, or None; more_eos_token_ids: further ones; chat_template: Jinja text, or None;
    bos_token, eos_token: the text of these tokens for templates.
    """

    makes_text = True  # False: no token has a text, and answers do not wait for theirs

    def __init__(self, backend: Backend, eos_token_id: int | None, chat_template: str | None = None) -> None:
        self.backend = backend
        self._decoder = _other_decoder(backend)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id = eos_token_id
        self.more_eos_token_ids: tuple[int, ...] = ()
        self.chat_template = chat_template
        longest = find("engine", "max_token_bytes")  # without the feature a token may be of any length
        self.max_token_bytes = sys.maxsize if longest is None else longest(backend, self._decoder)
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        # What TokenStream.push takes. Asking the library for each token of each answer would cost more than everything else here.
        self.piece = lru_cache(PIECES)(lambda token_id: (self.token(token_id), self.token_bytes(token_id)))
        self.eos_token = self.bos_token = "" if eos_token_id is None else self.token_text(eos_token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Text that spells a special token becomes that token, as in vLLM. `add_special_tokens` puts
        the beginning-of-text and similar tokens around it, if the model's tokenizer.json says so."""
        # As a batch of one: `encode` keeps the interpreter lock, so that a long text would stop every other thread for seconds.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        if self._decoder is not None:
            return self.backend.decode(token_ids, skip_special_tokens)
        wanted = [i for i in token_ids if not (skip_special_tokens and i in self._special)]
        raw = {i: self.token_bytes(i) for i in set(wanted)}  # a long text repeats its tokens
        return b"".join([raw[i] for i in wanted]).decode("utf-8", errors="replace")

    def stream(self, after: list[int], skip_special_tokens: bool = True) -> TokenStream:
        """For the text of tokens that follow the tokens `after` (the prompt)."""
        if self._decoder is None:
            return ByteLevelStream()
        shown = (i for i in reversed(after) if self.token_bytes(i) and not (skip_special_tokens and i in self._special))
        return self._decoder.stream(next(map(self.token, shown), ""))

    def is_special(self, token_id: int) -> bool:
        """True for tokens that are markers, not text, such as <|endoftext|>."""
        return token_id in self._special

    def special_tokens(self) -> dict[str, int]:
        """Every such marker as the vocabulary spells it, and its id."""
        return {self.token(token_id): token_id for token_id in sorted(self._special)}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id outside the vocabulary (the padding rows of a model whose
        embedding is larger than its vocabulary)."""
        token = self.token(token_id)
        if self._decoder is not None:
            return self._decoder.token_bytes(token)
        if token_id in self._added:
            return token.encode()
        try:
            return bytes(byte_of_symbol()[symbol] for symbol in token)
        except (
            KeyError
        ):  # a vocabulary may spell a token in other characters: then it stands for itself, as in the library's decoder
            return token.encode()

    def token(self, token_id: int) -> str:
        """A token as the vocabulary spells it; empty for an id outside it."""
        return self.backend.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """A token as text for display, e.g. in logprobs; incomplete UTF-8 is shown as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def _load_backend(folder: Path) -> Backend:
    """tokenizer.json, or the older pair vocab.json + merges.txt. Raises ConfigError when neither can be read."""
    try:
        if (folder / "tokenizer.json").exists():
            return Backend.from_file(str(folder / "tokenizer.json"))
        return wanted("engine", "pair_of_files", "the tokenizer of vocab.json and merges.txt")(folder)
    except Exception as error:  # the Rust library raises plain Exception
        raise ConfigError(f"cannot read the tokenizer in {folder}: {error}") from error


def _tokenizer_config(folder: Path) -> dict:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


def _content(token: object) -> str:
    """The text of a special token in tokenizer_config.json, where it is a string or an object that holds one."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _load(folder: Path, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """`eos_token_ids` are those of the model; the tokenizer's own is the first of them, or the only one."""
    backend, settings = _load_backend(folder), _tokenizer_config(folder)
    own = backend.token_to_id(_content(settings.get("eos_token")))
    eos_token_ids = eos_token_ids or (() if own is None else (own,))
    first = own if own in eos_token_ids else next(iter(eos_token_ids), None)
    try:
        read_template = find("engine", "chat_template")
        template = None if read_template is None else read_template(folder, settings)
        tokenizer = Tokenizer(backend, first, template)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    tokenizer.more_eos_token_ids = tuple(end for end in eos_token_ids if end != first)
    if "eos_token" in settings:
        tokenizer.eos_token = _content(settings["eos_token"])
    tokenizer.bos_token = _content(settings["bos_token"]) if "bos_token" in settings else tokenizer.eos_token
    return tokenizer


def init_tokenizer_from_configs(config: VllmConfig) -> Tokenizer:
    """The tokenizer that belongs to the configured model. Raises ConfigError when its files are unusable."""
    path, shape = config.model_config.tokenizer_path, config.shape
    for make in asked("engine", "no_tokenizer", config.model_config):
        stands_for_it: Tokenizer = make(config)
        return stands_for_it
    ends = () if shape.eos_token_id is None else (shape.eos_token_id, *shape.more_eos_token_ids)
    if path is None:
        tokenizer = Tokenizer(*wanted("engine", "stand_in_tokenizer", "a stand-in for a tokenizer")(shape.vocab_size))
    else:
        tokenizer = _load(Path(path), ends)
    if trace.on:
        trace.emit("tokenizer.loaded", vocab_size=tokenizer.vocab_size, source=path or "byte-level stand-in")
    return tokenizer


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model or a folder, without its model. Raises ModelNotFoundError, ConfigError."""
    return _load(Path(find_tokenizer(name, offline=False)), ())
