"""The names under which the model is served (vllm/entrypoints/openai/serving_models.py, OpenAIServingModels)."""

from __future__ import annotations

import time

from stage02_server.errors import not_found
from stage02_server.protocol_response import ModelCard, ModelList
from stage03_engine.config import VllmConfig


class OpenAIServingModels:
    """One model, which may have several names; the first one is what answers say."""

    def __init__(self, config: VllmConfig, names: tuple[str, ...]) -> None:
        self.names = names
        self._config = config
        self._created = int(time.time())

    def check(self, name: str | None) -> str:
        """The name to answer with. No name is fine: there is only one model. Raises APIError 404 for a foreign name."""
        if name is None:
            return self.names[0]
        # The model that everyone calls GPT-2 is "gpt2" on the hub.
        if name not in self.names and name.replace("gpt-2", "gpt2") not in self.names:
            raise not_found(f"The model `{name}` does not exist; this server has {', '.join(self.names)}.", "model")
        return name

    def card(self, name: str) -> ModelCard:
        """What is public about one model."""
        model = self._config.model_config.model
        return ModelCard(id=name, created=self._created, root=model, max_model_len=self._config.max_model_len)

    def list(self) -> ModelList:
        """GET /v1/models."""
        return ModelList(data=[self.card(name) for name in self.names])
