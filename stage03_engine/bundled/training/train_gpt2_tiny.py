"""Train the bundled model `gpt2-tiny`: tokenizer, weights, loss curve.

    python -m stage03_engine.bundled.training.train_gpt2_tiny --text tinyshakespeare.txt --out some/folder

The result is an ordinary Hugging Face folder (config.json, tokenizer.json, model.safetensors), so that it loads through
exactly the path that `gpt2` takes. Training uses transformers' GPT2LMHeadModel, not the GPT-2 written here: an error of
ours can then not hide in weights that were fitted to it.

Bits per byte, not loss per token, is the figure to compare: it does not depend on the tokenizer.
bits_per_byte = sum over held-out tokens of -log2 p(token) / bytes of held-out text.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB_SIZE = 2048
CONTEXT = 512
END_OF_TEXT = "<|endoftext|>"
HELD_OUT_FRACTION = 0.1  # the last tenth of the text is never trained on


def train_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE as GPT-2's: every byte sequence encodes, nothing is ever unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def build_model() -> GPT2LMHeadModel:
    """5.4 M parameters, dropout against the small text."""
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=CONTEXT, n_embd=256, n_layer=6, n_head=4,
        resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@torch.no_grad()
def held_out_bits_per_byte(model: GPT2LMHeadModel, tokens: torch.Tensor, num_bytes: int) -> float:
    """Every held-out token predicted once, from the tokens before it in its window. tokens: [num_tokens] int64."""
    model.eval()
    total_nats = 0.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for start in range(0, len(tokens) - 1, CONTEXT - 1):
            window = tokens[start : start + CONTEXT].unsqueeze(0)
            if window.shape[1] < 2:
                break
            logits = model(window).logits[0, :-1].float()
            total_nats += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
    model.train()
    return total_nats / math.log(2) / num_bytes


def learning_rate(step: int, steps: int, peak: float) -> float:
    warmup = 50
    if step < warmup:
        return peak * (step + 1) / warmup
    return 0.05 * peak + 0.95 * peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def save(model: GPT2LMHeadModel, out: Path) -> None:
    """float16 on disk: half the size, and the engine widens it once on loading."""
    state = {k.removeprefix("transformer."): v for k, v in model.state_dict().items()}
    state.pop("lm_head.weight")  # tied to wte
    save_file({k: v.to(torch.float16).contiguous() for k, v in state.items()}, out / "model.safetensors")


def parse_args() -> argparse.Namespace:
    """The flags; their defaults made the bundled model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="training text, UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument(
        "--steps", type=int, default=1200, help="optimiser steps; the learning rate ends at 5 %% of its peak"
    )
    parser.add_argument("--batch", type=int, default=8, help="windows of 512 tokens per step")
    parser.add_argument("--peak-lr", type=float, default=1.5e-3, help="highest learning rate, reached after 50 steps")
    parser.add_argument("--seed", type=int, default=1, help="of initialisation, dropout and batches")
    return parser.parse_args()


def train_step(model: GPT2LMHeadModel, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """One update; returns the loss in nats per token. batch: [windows, 512] int64."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def write_config(model: GPT2LMHeadModel, out: Path) -> None:
    """config.json and tokenizer_config.json, as the hub has them for gpt2."""
    config = model.config.to_diff_dict() | {"architectures": ["GPT2LMHeadModel"], "torch_dtype": "float16"}
    (out / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    tokenizer_config = {"tokenizer_class": "GPT2TokenizerFast", "model_max_length": CONTEXT, "bos_token": END_OF_TEXT,
                        "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT, "add_prefix_space": False}  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def main() -> None:
    """Tokenizer, training with a held-out check every 50 steps, and the best weights kept."""
    args = parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    text = args.text.read_text(encoding="utf-8")
    cut = int(len(text) * (1 - HELD_OUT_FRACTION))
    tokenizer = train_tokenizer(text[:cut])
    tokenizer.save(str(args.out / "tokenizer.json"))
    train, held_out = (torch.tensor(tokenizer.encode(part).ids) for part in (text[:cut], text[cut:]))
    model = build_model()
    write_config(model, args.out)
    print(f"{model.num_parameters() / 1e6:.2f} M parameters, {len(train)} training tokens, {len(held_out)} held out")

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.peak_lr, betas=(0.9, 0.98), weight_decay=0.1)
    log, best, started = open(args.out / "training_log.csv", "w", newline=""), math.inf, time.monotonic()
    rows = csv.writer(log)
    rows.writerow(("step", "train_loss_nats_per_token", "held_out_bits_per_byte", "seconds"))
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, args.steps, args.peak_lr)
        starts = torch.randint(len(train) - CONTEXT - 1, (args.batch,))
        loss = train_step(model, optimizer, torch.stack([train[s : s + CONTEXT] for s in starts]))
        if step % 50 == 0 or step == args.steps:
            bpb = held_out_bits_per_byte(model, held_out, len(text[cut:].encode()))
            rows.writerow((step, round(loss, 4), round(bpb, 4), round(time.monotonic() - started)))
            log.flush()
            print(f"step {step}: loss {loss:.3f} nats/token, held out {bpb:.4f} bits/byte", flush=True)
            if bpb < best:
                best = bpb
                save(model, args.out)
    log.close()


if __name__ == "__main__":
    main()
