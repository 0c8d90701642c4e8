"""The tokenizer of the front end: text <-> token ids, and the bytes of each token.

Built on `tokenizers` alone: importing transformers would bring torch into the API process (hundreds of megabytes, seconds).
Source: vllm/transformers_utils/tokenizer.py.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers

from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError
from stagetrace import trace

END_OF_TEXT = "<|endoftext|>"


@lru_cache(maxsize=1)
def _byte_of_symbol() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character; this is the way back (GPT-2's bytes_to_unicode).

    Printable Latin-1 bytes stand for themselves; the other 68 are shifted to code points from 256 upwards.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + n): byte for n, byte in enumerate(shifted)})
    return table


class Tokenizer:
    """A byte-level BPE tokenizer.

    vocab_size: number of token ids; max_token_bytes: length of the longest token; eos_token_id: the id that ends a text, or
    None; chat_template: Jinja text, or None.
    """

    def __init__(self, backend: Backend, eos_token_id: int | None, chat_template: str | None = None) -> None:
        self._backend = backend
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id = eos_token_id
        self.chat_template = chat_template
        self.max_token_bytes = max(map(len, backend.get_vocab()))  # each symbol stands for at most one byte
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Text that spells a special token becomes that token, as in vLLM."""
        return self._backend.encode(text).ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        wanted = [i for i in token_ids if not (skip_special_tokens and i in self._special)]
        return b"".join(self.token_bytes(i) for i in wanted).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        """True for tokens such as <|endoftext|> that are markers, not text."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id that the vocabulary does not hold (padding rows of a
        model whose embedding is larger than its vocabulary)."""
        if token_id in self._added:
            return self._added[token_id].encode()
        symbols = self._backend.id_to_token(token_id)
        return b"" if symbols is None else bytes(_byte_of_symbol()[symbol] for symbol in symbols)

    def token_text(self, token_id: int) -> str:
        """A token as text for display, e.g. in logprobs; incomplete UTF-8 is shown as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def _stand_in(vocab_size: int) -> Tokenizer:
    """The tokenizer for random weights without any files: one token per byte, in GPT-2's order of bytes (so "!" is 0
    as there), then visible placeholders for ids that only a random model produces, then <|endoftext|>."""
    symbols = list(_byte_of_symbol())[: vocab_size - 1]
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    vocab.update({f"Ġt{i}": i for i in range(len(symbols), vocab_size - 1)})
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return Tokenizer(backend, backend.token_to_id(END_OF_TEXT))


def _load_backend(folder: Path) -> Backend:
    """tokenizer.json, or the older pair vocab.json + merges.txt. Raises ConfigError when neither can be read."""
    try:
        if (folder / "tokenizer.json").exists():
            return Backend.from_file(str(folder / "tokenizer.json"))
        backend = Backend(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except Exception as error:  # the Rust library raises plain Exception
        raise ConfigError(f"cannot read the tokenizer in {folder}: {error}") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if (eos := backend.token_to_id(END_OF_TEXT)) is not None:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
        assert backend.token_to_id(END_OF_TEXT) == eos
    return backend


def _tokenizer_config(folder: Path) -> dict:
    path = folder / "tokenizer_config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def _load(folder: Path, eos_token_id: int | None) -> Tokenizer:
    backend = _load_backend(folder)
    if type(backend.decoder).__name__ != "ByteLevel":
        raise ConfigError(f"the tokenizer in {folder} is not a byte-level BPE; only that kind is supported")
    settings = _tokenizer_config(folder)
    eos = settings.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos_token_id is None and eos is not None:
        eos_token_id = backend.token_to_id(eos)
    template = settings.get("chat_template")
    return Tokenizer(backend, eos_token_id, template if isinstance(template, str) else None)


def init_tokenizer_from_configs(config: VllmConfig) -> Tokenizer:
    """The tokenizer that belongs to the configured model. Raises ConfigError when its files are unusable."""
    path, shape = config.model_config.tokenizer_path, config.shape
    tokenizer = _stand_in(shape.vocab_size) if path is None else _load(Path(path), shape.eos_token_id)
    if trace.on:
        trace.emit("tokenizer.loaded", vocab_size=tokenizer.vocab_size, source=path or "byte-level stand-in")
    return tokenizer
