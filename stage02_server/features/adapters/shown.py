"""What the server shows of its adapters: names in /v1/models, and the metric `vllm:lora_requests_info` (vllm/v1/metrics/loggers.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stage02_server.api_server import Services
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.adapters.registry import AdapterRegistry, KnownAdapter, registry_of

T = TypeVar("T")


class Known(Mapping[str, T]):
    """The names of all adapters that there are now -> what `shown` makes of each."""

    def __init__(self, registry: AdapterRegistry, shown: Callable[[KnownAdapter], T]) -> None:
        self._registry, self._shown = registry, shown

    def __getitem__(self, name: str) -> T:
        return self._shown(self._registry.known[name])

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._registry.known))

    def __len__(self) -> int:
        return len(self._registry.known)


class LoRARequestsInfo(Collector):
    """The metric `vllm:lora_requests_info`: its labels name the adapters of requests that run or wait, its value is the time of the engine's
    last outputs. Seen from here a request waits until its first token comes. (vLLM keeps a sample of each combination that ever was; here
    there is one, of now.)"""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """One sample."""
        running, waiting = set[str](), set[str]()
        for state in tuple(self._engine.output_processor.request_states.values()):
            if (adapter := state.request.sampling_params.lora) is not None:
                (running if state.stats.num_output_tokens else waiting).add(adapter)
        lora, last = self._engine.vllm_config.lora_config, self._engine.last_outputs_at
        names = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        metric = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters of the requests that run and wait.", labels=names
        )
        values = [str(getattr(lora, "max_loras", 1)), ",".join(sorted(running)), ",".join(sorted(waiting))]
        metric.add_metric(values, time.time() - (time.monotonic() - last) if last else 0.0)
        yield metric


def show(services: Services) -> None:
    """From now on the list of models and the metrics follow the registry."""
    registry = registry_of(services.engine.input_processor)
    registry.most = services.args.max_known_loras
    services.models.variants = Known(registry, lambda adapter: {"lora": adapter.name})
    services.models.roots = Known(registry, lambda adapter: adapter.folder)
    services.registry.register(LoRARequestsInfo(services.engine))
