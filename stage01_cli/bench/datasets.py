"""What the benchmarks send: prompts with a number of tokens to generate (vllm/benchmarks/datasets/datasets.py)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from stage03_engine.config import option
from stage03_engine.errors import ConfigError

if TYPE_CHECKING:
    from stage03_engine.frontend.tokenizer import Tokenizer

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom")


@dataclass(frozen=True)
class DatasetArgs:
    """What to send."""

    dataset_name: str = option(
        "random",
        "random = random tokens; prefix_repetition = the same, with a few shared prefixes; sharegpt = "
        "conversations as one JSON list; custom = one JSON object with `prompt` per line",
        DATASETS,
    )
    dataset_path: str | None = option(None, "file of the datasets sharegpt and custom")
    num_prompts: int = option(1000, "requests to send")
    input_len: int | None = option(None, "tokens per prompt of random; the same as random_input_len")
    output_len: int | None = option(None, "tokens to generate per request, in every dataset")
    random_input_len: int = option(1024, "tokens per prompt of random")
    random_output_len: int = option(128, "tokens to generate per prompt of random")
    random_range_ratio: float = option(0.0, "lengths of random vary by this share, up and down")
    random_prefix_len: int = option(0, "tokens that every prompt of random begins with, besides its own")
    prefix_repetition_prefix_len: int = option(256, "tokens of each shared prefix")
    prefix_repetition_suffix_len: int = option(256, "tokens of each prompt after the prefix")
    prefix_repetition_num_prefixes: int = option(10, "number of shared prefixes")
    prefix_repetition_output_len: int = option(128, "tokens to generate per prompt of prefix_repetition")
    sharegpt_output_len: int | None = option(
        None, "tokens to generate per conversation; as many as its answer has if not given"
    )
    custom_output_len: int = option(256, "tokens to generate per prompt of custom")
    disable_shuffle: bool = option(False, "keep the order of the file")
    no_oversample: bool = option(False, "do not repeat a file that holds fewer than num_prompts")


@dataclass(frozen=True)
class SampleRequest:
    """One request to send: the text, how many tokens it is, and how many to generate."""

    prompt: str
    prompt_len: int
    expected_output_len: int


def check_dataset(args: DatasetArgs) -> None:
    """Raises ConfigError for a setting that is impossible."""
    at_least = {
        "num_prompts": 1, "input_len": 1, "output_len": 1, "random_input_len": 1, "random_output_len": 1,
        "random_prefix_len": 0, "prefix_repetition_prefix_len": 1, "prefix_repetition_suffix_len": 1,
        "prefix_repetition_num_prefixes": 1, "prefix_repetition_output_len": 1, "sharegpt_output_len": 1,
        "custom_output_len": 1,
    }  # fmt: skip
    for name, least in at_least.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")
    if not 0.0 <= args.random_range_ratio < 1.0:
        raise ConfigError(f"random_range_ratio must be in [0, 1), not {args.random_range_ratio}")
    if (args.dataset_path is None) != (args.dataset_name in ("random", "prefix_repetition")):
        needs = "takes no" if args.dataset_path else "needs a"
        raise ConfigError(f"the dataset {args.dataset_name} {needs} file; see --dataset-path")


def get_samples(args: DatasetArgs, tokenizer: Tokenizer, seed: int) -> list[SampleRequest]:
    """`num_prompts` requests, the same for the same seed. Raises ConfigError if the file cannot be used."""
    rng = random.Random(seed)
    if args.dataset_name == "random":
        return _random(args, tokenizer, rng)
    if args.dataset_name == "prefix_repetition":
        return _prefix_repetition(args, tokenizer, rng)
    read = {"sharegpt": _sharegpt, "custom": _custom}[args.dataset_name]
    return _from_file(args, tokenizer, rng, read)


def _random(args: DatasetArgs, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    prefix = _random_ids(args.random_prefix_len, tokenizer, rng)

    def length(wanted: int) -> int:
        ratio = args.random_range_ratio
        return rng.randint(max(1, int(wanted * (1 - ratio))), max(1, int(wanted * (1 + ratio))))

    samples = []
    for _ in range(args.num_prompts):
        own = _random_ids(length(args.input_len or args.random_input_len), tokenizer, rng)
        prompt, count = _as_text(prefix + own, tokenizer, rng)
        samples.append(SampleRequest(prompt, count, length(args.output_len or args.random_output_len)))
    return samples


def _prefix_repetition(args: DatasetArgs, tokenizer: Tokenizer, rng: random.Random) -> list[SampleRequest]:
    prefix_len, suffix_len = args.prefix_repetition_prefix_len, args.prefix_repetition_suffix_len
    prefixes = [_random_ids(prefix_len, tokenizer, rng) for _ in range(args.prefix_repetition_num_prefixes)]
    samples = []
    for i in range(args.num_prompts):
        ids = prefixes[i % len(prefixes)] + _random_ids(suffix_len, tokenizer, rng)
        prompt, count = _as_text(ids, tokenizer, rng)
        samples.append(SampleRequest(prompt, count, args.output_len or args.prefix_repetition_output_len))
    rng.shuffle(samples)
    return samples


@lru_cache(maxsize=1)
def _words(tokenizer: Tokenizer) -> list[int]:
    """The tokens to draw from: whole words, because these stay the same when their text is tokenized again. A tokenizer
    with few words gives every token that is text: no special ones, no parts of characters."""
    texts = {i: tokenizer.token_text(i) for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)}
    words = [i for i, text in texts.items() if text.startswith(" ") and text[1:].isalpha()]
    return words if len(words) >= 100 else [i for i, text in texts.items() if text and "�" not in text]


def _random_ids(count: int, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    return rng.choices(_words(tokenizer), k=count)


def _as_text(ids: list[int], tokenizer: Tokenizer, rng: random.Random, tries: int = 10) -> tuple[str, int]:
    """A text of as many tokens as `ids`, and how many it has. Neighbours may merge when the text is tokenized, so the end
    is cut or filled up a few times; if no text fits exactly, the nearest is taken."""
    wanted = len(ids)
    for _ in range(tries):
        text = tokenizer.decode(ids)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == wanted:
            return text, wanted
        ids = ids[:wanted] + _random_ids(wanted - len(ids), tokenizer, rng)
    text = tokenizer.decode(ids)
    return text, len(tokenizer.encode(text, add_special_tokens=False))


Reader = Callable[[str, DatasetArgs, "Tokenizer"], Iterable[SampleRequest]]


def _from_file(args: DatasetArgs, tokenizer: Tokenizer, rng: random.Random, read: Reader) -> list[SampleRequest]:
    assert args.dataset_path is not None
    try:
        with open(args.dataset_path, encoding="utf-8") as file:
            found = list(read(file.read(), args, tokenizer))
    except OSError as error:
        raise ConfigError(f"cannot read {args.dataset_path}: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{args.dataset_path} does not have the form of the dataset {args.dataset_name}") from None
    if not found:
        raise ConfigError(f"{args.dataset_path} holds no requests")
    if not args.disable_shuffle:
        rng.shuffle(found)
    if not args.no_oversample:
        found *= -(-args.num_prompts // len(found))
    return found[: args.num_prompts]


def _sharegpt(text: str, args: DatasetArgs, tokenizer: Tokenizer) -> Iterable[SampleRequest]:
    """The first question of each conversation; its answer says how many tokens to generate."""
    for conversation in json.loads(text):
        turns: list[dict[str, Any]] = conversation["conversations"]
        if len(turns) >= 2:
            question, answer = turns[0]["value"], turns[1]["value"]
            wanted = args.output_len or args.sharegpt_output_len or len(tokenizer.encode(answer))
            if question and wanted:
                yield SampleRequest(question, len(tokenizer.encode(question)), wanted)


def _custom(text: str, args: DatasetArgs, tokenizer: Tokenizer) -> Iterable[SampleRequest]:
    """`{"prompt": "...", "output_tokens": 12}`, the number being optional."""
    for line in text.split("\n"):
        if line.strip():
            entry = dict(json.loads(line))
            wanted = int(args.output_len or entry.get("output_tokens") or args.custom_output_len)
            if wanted < 1:
                raise ValueError
            yield SampleRequest(entry["prompt"], len(tokenizer.encode(entry["prompt"])), wanted)
