"""Requests and answers that are about vectors (vllm/entrypoints/pooling: embed, pooling, scoring/protocol.py)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from stage02_server.protocol import ChatMessageParam, ChatTemplateFields, RequestModel, Salt
from stage02_server.protocol_response import UsageInfo
from stage02_server.protocol_types import Int32, Int64, ListOf, Text, TokenIds
from stage03_engine.errors import InvalidRequestError
from stage03_engine.params.pooling_params import PoolingParams

MAX_INPUTS = 2048  # texts of one request, OpenAI's number


class PoolingBase(RequestModel):
    """What all of them have in common."""

    refused: ClassVar[str] = "pooling"

    truncate_prompt_tokens: Annotated[Int64, Field(ge=-1)] | None = Field(
        default=None, description="Truncate a longer prompt to this many tokens; -1: to the length of the context."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="Which side of the prompt is cut off."
    )
    user: Text | None = Field(default=None, description="Accepted, and not used.")
    priority: Int64 = Field(default=0, description="With --scheduling-policy priority: smaller goes first.")
    cache_salt: Salt | None = Field(default=None, description="Only requests with the same salt share cached prefixes.")


class InputRequest(PoolingBase, ChatTemplateFields):
    """What those have in common that take one kind of text: `input`, or a chat that the chat template turns into one."""

    input: Text | TokenIds | ListOf[Text] | ListOf[TokenIds] | None = Field(
        default=None, description="A text, a list of token ids, or a list of either."
    )
    messages: ListOf[ChatMessageParam] | None = Field(
        default=None, description="The chat so far, the oldest message first."
    )
    add_generation_prompt: bool | None = Field(
        default=False, description="Let the template end with the beginning of an answer."
    )  # nobody answers
    use_activation: bool | None = Field(
        default=None, description="Scale vectors to length 1; make probabilities of classes."
    )
    add_special_tokens: bool | None = Field(
        default=None, description="Add the tokens that the tokenizer puts around a text."
    )  # None: with an input yes, with messages as in a chat

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

    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="Numbers as a list, or as bytes in base64."
    )
    dimensions: Int32 | None = Field(
        default=None, description="Keep so many of a vector's first numbers, if the model was trained for it."
    )
    # use_activation under vLLM's older name
    normalize: bool | None = Field(default=None, description="Scale the vector to length 1.")

    def to_pooling_params(self, task: str) -> PoolingParams:
        """Raises InvalidRequestError."""
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequestError("normalize and use_activation mean the same; give one of them.", "normalize")
        normalize = self.use_activation if self.normalize is None else self.normalize
        return PoolingParams(task=task, normalize=normalize, dimensions=self.dimensions)


class PoolingRequest(EmbeddingRequest):
    """POST /pooling: as vLLM does, one vector per token unless `task` says "embed" or "classify"."""

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = Field(
        default=None, description="What to make of the hidden states."
    )

    def task_of(self, tasks: tuple[str, ...]) -> str:
        """The request's own, or one vector per token."""
        return self.task or ("token_classify" if "token_classify" in tasks else "token_embed")


class ScoreBase(PoolingBase):
    """What scores and rankings have in common."""

    use_activation: bool | None = Field(
        default=None, description="Scale vectors to length 1; make probabilities of classes."
    )  # of a cross-encoder: false gives its logits


class ScoreRequest(ScoreBase):
    """POST /score: how well texts fit, in pairs. vLLM knows the two sides under four pairs of names."""

    text_1: Text | ListOf[Text] | None = Field(default=None, description="One text or several.")
    text_2: Text | ListOf[Text] | None = Field(
        default=None, description="What they are compared with: the same number, or any number with one."
    )
    queries: Text | ListOf[Text] | None = Field(default=None, description="Another name of text_1.")
    documents: Text | ListOf[Text] | None = Field(default=None, description="Another name of text_2.")
    items: Text | ListOf[Text] | None = Field(default=None, description="Another name of text_2.")
    data_1: Text | ListOf[Text] | None = Field(default=None, description="Another name of text_1.")
    data_2: Text | ListOf[Text] | None = Field(default=None, description="Another name of text_2.")

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

    query: Text = Field(description="What the documents are compared with.")
    documents: ListOf[Text] = Field(description="The texts to put in order.")
    top_n: Int32 = Field(default=0, description="Return so many of the best.")  # 0: all
    return_documents: bool | None = Field(default=True, description="Repeat the documents in the answer.")


class EmbeddingData(BaseModel):
    """The vector of one input, as numbers or as the base64 of little-endian float32."""

    index: int = Field(description="Its place, from 0.")
    object: Literal["embedding"] = Field(default="embedding", description="What kind of object this is.")
    embedding: list[float] | str = Field(description="The vector, as numbers or as base64.")


class EmbeddingResponse(BaseModel):
    """The answer of /v1/embeddings."""

    id: str = Field(description="The id of the answer.")
    object: Literal["list"] = Field(default="list", description="What kind of object this is.")
    created: int = Field(description="When the request came, in seconds since 1970.")
    model: str = Field(description="The name under which the model is served.")
    data: list[EmbeddingData] = Field(description="What was asked for, in its order.")
    usage: UsageInfo = Field(description="How many tokens the request took.")


class PoolingData(BaseModel):
    """One vector, or one per token; base64 holds them one after the other."""

    index: int = Field(description="Its place, from 0.")
    object: Literal["pooling"] = Field(default="pooling", description="What kind of object this is.")
    data: list[float] | list[list[float]] | str = Field(description="A vector, or one for each token.")


class PoolingResponse(BaseModel):
    """The answer of /pooling."""

    id: str = Field(description="The id of the answer.")
    object: Literal["list"] = Field(default="list", description="What kind of object this is.")
    created: int = Field(description="When the request came, in seconds since 1970.")
    model: str = Field(description="The name under which the model is served.")
    data: list[PoolingData] = Field(description="What was asked for, in its order.")
    usage: UsageInfo = Field(description="How many tokens the request took.")


class ScoreData(BaseModel):
    """What a cross-encoder says of two texts, or the cosine of the angle between their vectors: 1 is the same direction."""

    index: int = Field(description="Its place, from 0.")
    object: Literal["score"] = Field(default="score", description="What kind of object this is.")
    score: float = Field(description="How alike the two texts are.")


class ScoreResponse(BaseModel):
    """The answer of /score."""

    id: str = Field(description="The id of the answer.")
    object: Literal["list"] = Field(default="list", description="What kind of object this is.")
    created: int = Field(description="When the request came, in seconds since 1970.")
    model: str = Field(description="The name under which the model is served.")
    data: list[ScoreData] = Field(description="What was asked for, in its order.")
    usage: UsageInfo = Field(description="How many tokens the request took.")


class RerankDocument(BaseModel):
    """A document as it was sent."""

    text: str = Field(description="The text.")


class RerankResult(BaseModel):
    """`index` is the document's place in the request."""

    index: int = Field(description="Its place in the request, from 0.")
    document: RerankDocument | None = Field(description="The text, if the request asked for it.")
    relevance_score: float = Field(description="How well it fits the query.")


class RerankUsage(BaseModel):
    """Tokens of query and documents."""

    prompt_tokens: int = Field(description="Tokens of the prompt.")
    total_tokens: int = Field(description="Both.")


class RerankResponse(BaseModel):
    """The answer of /rerank, the most relevant document first."""

    id: str = Field(description="The id of the answer.")
    model: str = Field(description="The name under which the model is served.")
    usage: RerankUsage = Field(description="How many tokens the request took.")
    results: list[RerankResult] = Field(description="The documents, the best first.")


class ClassificationRequest(InputRequest):
    """POST /classify."""

    def to_pooling_params(self) -> PoolingParams:
        """One number per class, as probabilities unless `use_activation` is false."""
        return PoolingParams(task="classify", normalize=self.use_activation)


class ClassificationData(BaseModel):
    """What one input is: the label of the largest of `probs`, which holds one number for each of `num_classes` classes."""

    index: int = Field(description="Its place, from 0.")
    label: str = Field(description="The name of the likeliest class.")
    probs: list[float] = Field(description="A number for each class.")
    num_classes: int = Field(description="How many classes there are.")


class ClassificationResponse(BaseModel):
    """The answer of /classify."""

    id: str = Field(description="The id of the answer.")
    object: Literal["list"] = Field(default="list", description="What kind of object this is.")
    created: int = Field(description="When the request came, in seconds since 1970.")
    model: str = Field(description="The name under which the model is served.")
    data: list[ClassificationData] = Field(description="What was asked for, in its order.")
    usage: UsageInfo = Field(description="How many tokens the request took.")
