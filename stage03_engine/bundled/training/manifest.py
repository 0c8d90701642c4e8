"""`python -m stage03_engine.bundled.training.train_gpt2_tiny`."""

from __future__ import annotations

from stage03_engine.plugins import Feature

FEATURE = Feature(name="training", help="the script that trained gpt2-tiny", room=__package__)
