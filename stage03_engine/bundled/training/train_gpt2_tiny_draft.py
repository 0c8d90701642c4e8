"""Train the bundled draft `gpt2-tiny-draft`: a much smaller GPT-2 that guesses what `gpt2-tiny` would write.

    python -m stage03_engine.bundled.training.train_gpt2_tiny_draft --text tinyshakespeare.txt --out some/folder

A draft need not know the language, only its target: it learns the target's whole distribution at each position (distillation, Hinton et al.
2015), on the training text and on texts that the target wrote, because there it will be asked (on-policy data; Zhou et al. 2023, DistillSpec).
The result is an ordinary folder with the target's tokenizer, as `gpt2-tiny`'s is.

What counts is how often the target keeps a guess. On held-out text, and on texts of the target's that were not trained on:

    agreement = share of positions where the likeliest tokens are the same       (kept at temperature 0)
    overlap   = mean over positions of sum over tokens of min(p, q)              (kept at temperature 1 by any exact method at best)
"""

from __future__ import annotations

import argparse
import csv
import shutil
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from stage03_engine.bundled.training.train_gpt2_tiny import (
    CONTEXT,
    HELD_OUT_FRACTION,
    VOCAB_SIZE,
    learning_rate,
    save,
    write_config,
)
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.sampling_params import SamplingParams

TARGET = BUNDLED_FOLDER / "gpt2-tiny"
PROMPT = 16  # tokens of the training text that the target continues
TEMPERATURES = (0.0, 0.7, 1.0)  # of what it writes, in turn


def build_draft() -> GPT2LMHeadModel:
    """One layer: a step of the draft is paid once for every token that it guesses, and its time is the number of its operations."""
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=CONTEXT, n_embd=96, n_layer=1, n_head=3,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def write_texts(llm: LLM, prompts: Tensor, temperature: float) -> Tensor:
    """What the target writes after `prompts` [num_texts, PROMPT], up to its context: [num_texts, CONTEXT]."""
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=CONTEXT - PROMPT, ignore_eos=True)
        for number in range(len(prompts))
    ]
    answers = llm.generate(prompts.tolist(), params)
    return torch.tensor([[*prompt, *answer.outputs[0].token_ids] for prompt, answer in zip(prompts.tolist(), answers)])


def windows(tokens: Tensor, count: int, length: int) -> Tensor:
    """`count` random windows of `tokens` [num_tokens]: [count, length]."""
    return torch.stack([tokens[start : start + length] for start in torch.randint(len(tokens) - length, (count,))])


@torch.inference_mode()
def teach(target: GPT2LMHeadModel, texts: Tensor) -> Tensor:
    """The target's log-probabilities [num_texts, CONTEXT, vocab] for texts [num_texts, CONTEXT], in float16: 2 MB a text, computed once."""
    taught = torch.empty(*texts.shape, VOCAB_SIZE, dtype=torch.float16)
    for number, text in enumerate(texts):
        taught[number] = target(text[None]).logits[0].log_softmax(-1)
    return taught


def train_step(draft: GPT2LMHeadModel, optimizer: torch.optim.Optimizer, batch: Tensor, taught: Tensor) -> float:
    """One update by KL(target || draft), in nats per token."""
    logprobs = draft(batch).logits.log_softmax(-1).flatten(0, 1)
    loss = F.kl_div(logprobs, taught.float().flatten(0, 1), reduction="batchmean", log_target=True)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@torch.inference_mode()
def compare(target: GPT2LMHeadModel, draft: GPT2LMHeadModel, texts: Tensor) -> tuple[float, float]:
    """(agreement, overlap) over texts [num_texts, CONTEXT]."""
    same, shared, count = 0.0, 0.0, 0
    for batch in texts.split(8):
        p, q = target(batch).logits, draft(batch).logits
        same += float((p.argmax(-1) == q.argmax(-1)).sum())
        shared += float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum())
        count += batch.numel()
    return same / count, shared / count


def parse_args() -> argparse.Namespace:
    """The flags; their defaults made the bundled draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the text that gpt2-tiny was trained on, UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the draft to")
    parser.add_argument("--own-texts", type=int, default=48, help="texts of 512 tokens that the target writes first")
    parser.add_argument("--texts", type=int, default=240, help="texts of 512 tokens out of the training text")
    parser.add_argument("--steps", type=int, default=700, help="optimiser steps")
    parser.add_argument("--batch", type=int, default=8, help="texts per step")
    parser.add_argument("--peak-lr", type=float, default=5e-3, help="highest learning rate")
    parser.add_argument(
        "--threads", type=int, default=1, help="compute threads: more only on cores that nobody else uses"
    )
    parser.add_argument("--seed", type=int, default=1, help="of initialisation, texts and batches")
    return parser.parse_args()


FIGURES = ("held_out_agreement", "held_out_overlap", "greedy_agreement", "sampled_overlap")


class Lessons:
    """What the draft learns from, and what it is compared on; `texts` [num_texts, CONTEXT] were read by the target, the others never."""

    def __init__(self, args: argparse.Namespace, target: GPT2LMHeadModel) -> None:
        text, tokenizer = args.text.read_text(encoding="utf-8"), Tokenizer.from_file(str(TARGET / "tokenizer.json"))
        cut = int(len(text) * (1 - HELD_OUT_FRACTION))
        train, held_out = (torch.tensor(tokenizer.encode(part).ids) for part in (text[:cut], text[cut:]))
        with LLM(str(TARGET), dtype="float32", num_threads=args.threads, enable_prefix_caching=False) as llm:
            count = args.own_texts // len(TEMPERATURES)
            own = [write_texts(llm, windows(train, count, PROMPT), each) for each in TEMPERATURES]
            self.greedy, self.sampled = (write_texts(llm, windows(held_out, 8, PROMPT), each) for each in (0.0, 1.0))
        self.texts = torch.cat([windows(train, args.texts, CONTEXT), *own])
        self.taught = teach(target, self.texts)
        self.target, self.held_out = target, held_out[: len(held_out) // CONTEXT * CONTEXT].view(-1, CONTEXT)[:16]

    def examine(self, draft: GPT2LMHeadModel) -> tuple[float, ...]:
        """The FIGURES of a draft."""
        greedy, _ = compare(self.target, draft, self.greedy)
        _, sampled = compare(self.target, draft, self.sampled)
        return (*compare(self.target, draft, self.held_out), greedy, sampled)


def main() -> None:
    """The target's texts, then training, with a comparison every 100 steps; the last weights are kept."""
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(TARGET / "tokenizer.json", args.out / "tokenizer.json")
    target = GPT2LMHeadModel.from_pretrained(TARGET, dtype=torch.float32).eval()
    draft, started = build_draft(), time.monotonic()
    write_config(draft, args.out)
    lessons = Lessons(args, target)
    print(
        f"{draft.num_parameters() / 1e6:.3f} M parameters; texts after {time.monotonic() - started:.0f} s", flush=True
    )
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    with open(args.out / "training_log.csv", "w", newline="") as log:
        rows = csv.writer(log)
        rows.writerow(("step", "kl_nats_per_token", *FIGURES, "seconds"))
        for step in range(1, args.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step - 1, args.steps, args.peak_lr)
            chosen = torch.randint(len(lessons.texts), (args.batch,))
            loss = train_step(draft, optimizer, lessons.texts[chosen], lessons.taught[chosen])
            if step % 100 == 0 or step == args.steps:
                row = (step, *(round(f, 4) for f in (loss, *lessons.examine(draft))), round(time.monotonic() - started))
                rows.writerow(row)
                log.flush()
                save(draft, args.out)
                print(*row, flush=True)


if __name__ == "__main__":
    main()
