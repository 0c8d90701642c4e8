"""POST /classify (vllm/entrypoints/pooling/classify, ServingClassification): which class a text belongs to."""

from __future__ import annotations

import time

from starlette.requests import Request

from stage02_server.features.pooling.serving import PoolingBatches, numbers, usage_of
from stage02_server.protocol_classify import ClassificationData, ClassificationRequest, ClassificationResponse


class ServingClassification(PoolingBatches):
    """Labels for texts."""

    async def create_classify(self, request: ClassificationRequest, raw_request: Request) -> ClassificationResponse:
        """One label per input, and a probability per class. Of equal ones the first class wins."""
        created, model = int(time.time()), self.check(request, "classify")
        outputs = await self.run_inputs(request, request.to_pooling_params(), raw_request, model)
        labels, data = self.engine_client.vllm_config.shape.labels, []
        for index, output in enumerate(outputs):
            (vector,) = output.pooled or []
            probs = numbers(vector)
            label = labels[probs.index(max(probs))]
            data.append(ClassificationData(index=index, label=label, probs=probs, num_classes=len(probs)))
        response_id, usage = raw_request.state.ids.response, usage_of(outputs)
        return ClassificationResponse(id=response_id, created=created, model=model, data=data, usage=usage)
