"""/invocations and /ping."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="sagemaker",
    help="the two addresses that Amazon SageMaker asks: /invocations and /ping",
    room=__package__,
    parts=(Part("routes", ".sagemaker:install", paths={"/ping": "", "/invocations": "invocation-"}, late=True),),
    events=("request.named",),
)
