"""Tokenizers as Llama 2 and Mistral, Llama 3, and Qwen have them, trained on a few sentences; and a model folder for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

TEXTS = [
    "To be, or not to be, that is the question.", "Whether 'tis nobler in the mind to suffer", "the slings and arrows",
    "Bonjour à tous, c'est déjà l'été.", "To die, to sleep; to sleep, perchance to dream.   And so on.",
]  # fmt: skip
BOS = [("<s>", 1)]


def sentencepiece(strip: bool = True) -> Backend:
    """Llama 2, Mistral: text with ▁ for spaces, <0xNN> for what the vocabulary lacks; without `strip` as Gemma."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training only: no token holds two words
    backend.train_from_iterator(TEXTS, BpeTrainer(vocab_size=150, show_progress=False))
    state = json.loads(backend.to_str()) | {"pre_tokenizer": None}
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *state["model"]["vocab"], "▁▁▁▁"]
    state["model"]["vocab"] = {name: i for i, name in enumerate(dict.fromkeys(names))}
    backend = Backend.from_str(json.dumps(state))
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:3]])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=BOS)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    return backend


def metaspace() -> Backend:
    """The newer way to say the same, without bytes."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(TEXTS, BpeTrainer(vocab_size=150, special_tokens=["<unk>", "<s>"], show_progress=False))
    backend.add_tokens(["▁▁x▁"])
    backend.decoder = decoders.Metaspace()
    return backend


def wordpiece(cleanup: bool = True) -> Backend:
    """BERT: words, and parts of words that begin with ##."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    backend.train_from_iterator(TEXTS, WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False))
    backend.decoder = decoders.WordPiece(cleanup=cleanup)
    return backend


def end_of_word() -> Backend:
    """GPT-1: </w> ends a word."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = BpeTrainer(vocab_size=120, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.decoder = decoders.BPEDecoder()
    return backend


def unigram(decoder: Any = None) -> Backend:
    """T5 with a decoder; without one the library puts a space between any two tokens."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "</s>"]
    trainer = UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.decoder = decoder
    return backend


def byte_level(bos: bool = True, normalizer: Any = None) -> Backend:
    """Llama 3 with a beginning-of-text token; Qwen with NFC and without."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(
        TEXTS, BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    )
    backend.add_tokens(["<tool>"])
    backend.decoder = decoders.ByteLevel()
    parts = [processors.ByteLevel(trim_offsets=False)]
    if bos:
        parts.append(processors.TemplateProcessing(single="<s> $A", special_tokens=BOS))
    backend.post_processor = processors.Sequence(parts)
    return backend


def model_folder(folder: Path, backend: Backend, settings: dict[str, Any], **config: Any) -> Path:
    """A tiny Llama without weights, with this tokenizer."""
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shape = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "vocab_size": 500, "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape | config))
    return folder
