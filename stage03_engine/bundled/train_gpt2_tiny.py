"""Train the bundled model `gpt2-tiny`: tokenizer, weights, loss curve.

    python -m stage03_engine.bundled.train_gpt2_tiny --text tinyshakespeare.txt --out some/folder

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


def build_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=CONTEXT, n_embd=256, n_layer=6, n_head=4,
        resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@torch.no_grad()
def held_out_bits_per_byte(model, tokens: torch.Tensor, num_bytes: int) -> float:
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


def save(model, out: Path) -> None:
    """float16 on disk: half the size, and the engine widens it once on loading."""
    state = {k.removeprefix("transformer."): v for k, v in model.state_dict().items()}
    state.pop("lm_head.weight")  # tied to wte
    save_file({k: v.to(torch.float16).contiguous() for k, v in state.items()}, out / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="training text, UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--minutes", type=float, default=45, help="stop after this much time, at the best checkpoint")
    parser.add_argument("--steps", type=int, default=1500, help="length of the learning-rate schedule")
    parser.add_argument("--batch", type=int, default=8, help="windows of 512 tokens per step")
    parser.add_argument("--peak-lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    text = args.text.read_text(encoding="utf-8")
    cut = int(len(text) * (1 - HELD_OUT_FRACTION))
    tokenizer = train_tokenizer(text[:cut])
    tokenizer.save(str(args.out / "tokenizer.json"))
    train = torch.tensor(tokenizer.encode(text[:cut]).ids)
    held_out = torch.tensor(tokenizer.encode(text[cut:]).ids)
    held_out_bytes = len(text[cut:].encode())

    model = build_model()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {len(train)} training tokens, {len(held_out)} held out", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.peak_lr, betas=(0.9, 0.98), weight_decay=0.1)
    rows, best, started = [], math.inf, time.monotonic()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.peak_lr)
        starts = torch.randint(len(train) - CONTEXT - 1, (args.batch,))
        batch = torch.stack([train[s : s + CONTEXT] for s in starts])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        out_of_time = time.monotonic() - started > args.minutes * 60
        if step % 50 == 49 or step == args.steps - 1 or out_of_time:
            bpb = held_out_bits_per_byte(model, held_out, held_out_bytes)
            rows.append((step + 1, round(loss.item(), 4), round(bpb, 4), round(time.monotonic() - started)))
            print(*rows[-1], flush=True)
            if bpb < best:
                best = bpb
                save(model, args.out)
            with open(args.out / "training_log.csv", "w", newline="") as f:
                csv.writer(f).writerows(
                    [("step", "train_loss_nats_per_token", "held_out_bits_per_byte", "seconds"), *rows]
                )
        if out_of_time:
            break

    config = model.config.to_diff_dict() | {"architectures": ["GPT2LMHeadModel"], "torch_dtype": "float16"}
    (args.out / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    tokenizer_config = {"tokenizer_class": "GPT2TokenizerFast", "model_max_length": CONTEXT, "bos_token": END_OF_TEXT,
                        "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT, "add_prefix_space": False}  # fmt: skip
    (args.out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    print(f"best held-out bits per byte: {best:.4f}")


if __name__ == "__main__":
    main()
