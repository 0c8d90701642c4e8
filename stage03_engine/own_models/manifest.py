"""Models that installed packages register."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="own_models",
    help="models of your own, from installed packages: ModelRegistry.register_model",
    room=__package__,
    parts=(Part("engine", ".general_plugins:load_general_plugins", key="general_plugins"),),
    needs=("own_classes",),
    variables=("VLLM_PLUGINS",),
)
