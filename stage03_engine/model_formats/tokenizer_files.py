"""What a tokenizer's folder may hold beside tokenizer.json: vocab.json with merges.txt, and a chat template. And the tokenizer
for random weights, which has no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers

from stage03_engine.errors import ConfigError
from stage03_engine.frontend.tokenizer import byte_of_symbol

END_OF_TEXT = "<|endoftext|>"


def read_pair(folder: Path) -> Backend:
    """vocab.json and merges.txt, as GPT-2 was published. Raises whatever the tokenizers library raises."""
    backend = _byte_level(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    if (eos := backend.token_to_id(END_OF_TEXT)) is not None:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
        assert backend.token_to_id(END_OF_TEXT) == eos
    return backend


def stand_in(vocab_size: int) -> tuple[Backend, int | None]:
    """The tokenizer for random weights without any files, and its end-of-text id: one token per byte, in GPT-2's order of bytes
    (so "!" is 0 as there), then visible placeholders for ids that only a random model produces, then <|endoftext|>."""
    symbols = list(byte_of_symbol())[: vocab_size - 1]
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    vocab.update({f"Ġt{i}": i for i in range(len(symbols), vocab_size - 1)})
    backend = _byte_level(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return backend, backend.token_to_id(END_OF_TEXT)


def _byte_level(model: models.BPE) -> Backend:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def read_chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else that of tokenizer_config.json (`settings`): a text, or a list of named ones, of which "default"
    counts. Raises ConfigError."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
