"""`python -m stage03_engine.bundled.training.train_gpt2_tiny`, and `train_gpt2_tiny_draft` and `train_adapter` beside it."""

from __future__ import annotations

from stage03_engine.plugins import Feature

FEATURE = Feature(
    name="training", help="the scripts that trained gpt2-tiny, its draft and its adapter", room=__package__
)
