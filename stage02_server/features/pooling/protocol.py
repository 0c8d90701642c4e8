"""Requests and answers that are about vectors (vllm/entrypoints/pooling: embed, pooling, score/protocol.py)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel

from stage02_server.protocol import ChatMessageParam, ChatTemplateFields, RequestModel
from stage02_server.protocol_response import UsageInfo
from stage02_server.protocol_types import Int32, Int64, Text, TokenIds
from stage03_engine.errors import InvalidRequestError
from stage03_engine.params.pooling_params import PoolingParams

MAX_INPUTS = 2048  # texts of one request, OpenAI's number


class PoolingBase(RequestModel):
    """What all of them have in common."""

    refused: ClassVar[str] = "pooling"

    truncate_prompt_tokens: Int64 | None = None
    truncation_side: Literal["left", "right"] | None = None
    user: Text | None = None
    priority: Int32 = 0
    cache_salt: Text | None = None


class InputRequest(PoolingBase, ChatTemplateFields):
    """What those have in common that take one kind of text: `input`, or a chat that the chat template turns into one."""

    input: Text | TokenIds | list[Text] | list[TokenIds] | None = None
    messages: list[ChatMessageParam] | None = None
    add_generation_prompt: bool | None = False  # nobody answers
    use_activation: bool | None = None
    add_special_tokens: bool | None = None  # None: with an input yes, with messages as in a chat

    def prompts(self) -> list[str | list[int]] | None:
        """One or more inputs, each as text or as token ids; None when there are messages instead. Raises
        InvalidRequestError."""
        if (self.input is None) == (self.messages is None):
            raise InvalidRequestError("Give either input or messages.", "input")
        if self.input is None:
            return None
        if isinstance(self.input, list) and self.input and isinstance(self.input[0], str | list):
            return list(self.input)
        return [self.input]  # type: ignore[list-item]


class EmbeddingRequest(InputRequest):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int32 | None = None
    normalize: bool | None = None  # use_activation under vLLM's older name

    def to_pooling_params(self, task: str) -> PoolingParams:
        """Raises InvalidRequestError."""
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequestError("normalize and use_activation mean the same; give one of them.", "normalize")
        normalize = self.use_activation if self.normalize is None else self.normalize
        return PoolingParams(task=task, normalize=normalize, dimensions=self.dimensions)


class PoolingRequest(EmbeddingRequest):
    """POST /pooling: as vLLM does, one vector per token unless `task` says "embed" or "classify"."""

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None

    def task_of(self, tasks: tuple[str, ...]) -> str:
        """The request's own, or one vector per token."""
        return self.task or ("token_classify" if "token_classify" in tasks else "token_embed")


class ScoreBase(PoolingBase):
    """What scores and rankings have in common."""

    use_activation: bool | None = None  # of a cross-encoder: false gives its logits


class ScoreRequest(ScoreBase):
    """POST /score: how well texts fit, in pairs. vLLM knows the two sides under four pairs of names."""

    text_1: Text | list[Text] | None = None
    text_2: Text | list[Text] | None = None
    queries: Text | list[Text] | None = None
    documents: Text | list[Text] | None = None
    items: Text | list[Text] | None = None
    data_1: Text | list[Text] | None = None
    data_2: Text | list[Text] | None = None

    def sides(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        """(name of the field, its texts) of both sides: 1 and N texts, or N and N. Raises InvalidRequestError."""
        pairs = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
        given = [pair for pair in pairs if None not in (getattr(self, pair[0]), getattr(self, pair[1]))]
        if len(given) != 1:
            known = ", ".join(" and ".join(pair) for pair in pairs)
            raise InvalidRequestError(f"Give the two sides under one of these pairs of names: {known}.", "text_1")
        (left, right) = given[0]
        one, two = (
            [value] if isinstance(value, str) else value for value in (getattr(self, left), getattr(self, right))
        )
        if not one or not two or len(one) not in (1, len(two)):
            sizes = f"1 to N or N to N, got {len(one)} and {len(two)}"
            raise InvalidRequestError(f"{left} and {right} must be {sizes}.", left)
        return (left, one), (right, two)


class RerankRequest(ScoreBase):
    """POST /rerank, in the form that Jina and Cohere share."""

    query: Text
    documents: list[Text]
    top_n: Int32 = 0  # 0: all
    return_documents: bool | None = True


class EmbeddingData(BaseModel):
    """The vector of one input, as numbers or as the base64 of little-endian float32."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    """The answer of /v1/embeddings."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingData]
    usage: UsageInfo


class PoolingData(BaseModel):
    """One vector, or one per token; base64 holds them one after the other."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | list[list[float]] | str


class PoolingResponse(BaseModel):
    """The answer of /pooling."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingData]
    usage: UsageInfo


class ScoreData(BaseModel):
    """What a cross-encoder says of two texts, or the cosine of the angle between their vectors: 1 is the same direction."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(BaseModel):
    """The answer of /score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreData]
    usage: UsageInfo


class RerankDocument(BaseModel):
    """A document as it was sent."""

    text: str


class RerankResult(BaseModel):
    """`index` is the document's place in the request."""

    index: int
    document: RerankDocument | None
    relevance_score: float


class RerankUsage(BaseModel):
    """Tokens of query and documents."""

    prompt_tokens: int
    total_tokens: int


class RerankResponse(BaseModel):
    """The answer of /rerank, the most relevant document first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]


class ClassificationRequest(InputRequest):
    """POST /classify."""

    def to_pooling_params(self) -> PoolingParams:
        """One number per class, as probabilities unless `use_activation` is false."""
        return PoolingParams(task="classify", normalize=self.use_activation)


class ClassificationData(BaseModel):
    """What one input is: the label of the largest of `probs`, which holds one number for each of `num_classes` classes."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(BaseModel):
    """The answer of /classify."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassificationData]
    usage: UsageInfo
