# %% [markdown]
# # 06 A request arrives
#
# *Before: [03](03_api_server.ipynb) · about 45 minutes with the exercise*
#
# **Question.** A body of JSON becomes a prompt and a set of sampling parameters. What is checked on the way, in which layer, and what does a client hear when something is wrong?
#
# | part | here | vLLM |
# |---|---|---|
# | routes | [`create_completion`](../stage02_server/routes.py), [`create_chat_completion`](../stage02_server/routes.py) | `entrypoints/openai/api_server.py` |
# | the form of a body | [`CompletionRequest`](../stage02_server/protocol.py), [`ChatCompletionRequest`](../stage02_server/protocol.py) | `entrypoints/openai/completion/protocol.py`, `chat_completion/protocol.py` |
# | handlers | [`OpenAIServingCompletion`](../stage02_server/serving_completion.py), [`OpenAIServingChat`](../stage02_server/serving_chat.py) | `entrypoints/openai/completion/serving.py`, `chat_completion/serving.py` |
# | chat template | [`ChatTemplate`](../stage02_server/chat_template.py) | `renderers/chat_utils/chat_message.py` |
# | parameters | [`SamplingParams`](../stage03_engine/sampling_params.py) | `sampling_params.py` |
# | what only the model's length and vocabulary can tell | [`InputProcessor.process_inputs`](../stage03_engine/frontend/input_processor.py) | `v1/engine/input_processor.py` |
# | errors | [`as_api_error`](../stage02_server/errors.py) | `entrypoints/serve/exception_handling/error_response.py` create_error_response |

# %%
import json

import lab

server = lab.Server(
    "--engine", "echo"
)  # answers with the prompt itself: this notebook is about what happens before the engine
print(server.log[-1].partition("] ")[2].replace(server.url, "URL"))

# %% [markdown]
# ## From body to parameters
#
# `pydantic` checks the form: is `max_tokens` an integer? [`SamplingParams`](../stage03_engine/sampling_params.py) checks the values, alone and together: is the temperature in its range, may `n` be 2 with these
# settings? A field that is not given takes its default.

# %% tags=["today"]
from stage02_server.protocol import CompletionRequest

body = CompletionRequest.model_validate({"prompt": "ROMEO:", "max_tokens": 8, "stop": "\n", "top_k": -1, "user": "me"})
params = body.to_sampling_params()
print(
    {name: getattr(params, name) for name in ("temperature", "max_tokens", "stop", "top_k", "n", "seed", "output_kind")}
)

# %% [markdown]
# ## Two answers to the same body

# %%
body = {"model": "gpt2-tiny", "prompt": "To be, or not", "max_tokens": 4, "temperature": 0}
status, answer = server.ask("/v1/completions", body, X_Request_Id="hamlet")
print(status, json.dumps(answer, indent=1)[:700])

# %%
for line in server.stream("/v1/completions", body, X_Request_Id="hamlet"):
    print(line[:60], "..." if len(line) > 60 else "", line[-75:] if len(line) > 60 else "")

# %% [markdown]
# `hamlet` came from the client's header `X-Request-Id`. In the engine the request has a longer id, because clients may send one id twice.
#
# ## A chat is one prompt
#
# The engine knows no messages. A template turns them into one text.

# %% [markdown] tags=["predict"]
# > **Predict.** *Execution Flow* (6.3; [all five descriptions](MAP.md)) applies "the chat template" of GPT-2, which has none. What is the prompt for the messages (system: "Be brief.",
# > user: "Who are you?")? What would vLLM do?

# %% tags=["predict"]
lab.predict(prompt=None)  # a text

# %%
from stage02_server.chat_template import ChatTemplate
from stage02_server.cli_args import FrontendArgs
from stage02_server.protocol import ChatMessageParam
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs

tokenizer = init_tokenizer_from_configs(EngineArgs.from_kwargs(model="gpt2-tiny"))
messages = [ChatMessageParam(role="system", content="Be brief."), ChatMessageParam(role="user", content="Who are you?")]
print("no template:", repr(await ChatTemplate(FrontendArgs(), tokenizer).apply(messages)))
CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"
print("a template: ", repr(await ChatTemplate(FrontendArgs(chat_template=CHATML), tokenizer).apply(messages)))
lab.claim(
    "no template: the contents, one after the other",
    "".join((await ChatTemplate(FrontendArgs(), tokenizer).apply(messages)).split()) == "Bebrief.Whoareyou?",
)
lab.compare(prompt=await ChatTemplate(FrontendArgs(), tokenizer).apply(messages))

# %% [markdown]
# Plain concatenation, with no mark of who said what; the server says so once in its log. vLLM refuses to chat with such a model instead. A template comes with the model, or from
# `--chat-template`; it runs in a sandbox, because a model's files are data from somebody else.

# %%
chat = {"messages": [message.model_dump(exclude_none=True) for message in messages], "max_tokens": 4, "temperature": 0}
print(server.ask("/v1/chat/completions", chat)[1]["choices"][0])

# %% [markdown]
# ## What is refused, and how
#
# Two kinds of 400 can be told apart. Type `Bad Request` and `body.<field>`: the body does not have the right form. Type `BadRequestError` and the bare field: it has, and cannot be served.

# %% [markdown] tags=["predict"]
# > **Predict.** For each body below: accepted or refused, with which status, and which field is blamed? The model's context is 512 tokens.
# > Look closely at `max_tokens`: 500 with a prompt of 20 tokens, 512, 513, and 0.

# %% tags=["predict"]
lab.predict(max_tokens_500=None, max_tokens_512=None, max_tokens_513=None, max_tokens_0=None)  # a status each

# %% tags=["today"]
long_prompt = [5] * 20
BODIES = [
    {},
    {"prompt": "x", "max_tokens": "many"},
    {"prompt": "x", "temperature": 2.5},
    {"prompt": "x", "temperature": 0, "n": 2},
    {"prompt": "x", "top_p": 0},
    {"prompt": "x", "top_k": -1},
    {"prompt": "x", "stop": ["a", "b", "c", "d", "e"]},
    {"prompt": "x", "stop": ""},
    {"prompt": "x", "logprobs": 21},
    {"prompt": "x", "logit_bias": {"99999": 1}},
    {"prompt": [99999]},
    {"prompt": [5] * 512},
    {"prompt": long_prompt, "max_tokens": 500},
    {"prompt": long_prompt, "max_tokens": 512},
    {"prompt": long_prompt, "max_tokens": 513},
    {"prompt": long_prompt, "max_tokens": 0},
    {"prompt": "x", "echo": True},
    {"prompt": "x", "echoo": True},
    {"prompt": "x", "suffix": "y"},
    {"prompt": "x", "stream_options": {}},
    {"prompt": "x", "model": "gpt-3"},
]


def short(body):
    text = (
        json.dumps(body).replace(json.dumps([5] * 512), "[512 tokens]").replace(json.dumps(long_prompt), "[20 tokens]")
    )
    return text if len(text) <= 56 else text[:53] + "..."


rows, said = [], []
for body in BODIES:
    status, answer = server.ask("/v1/completions", {"max_tokens": 4, **body} if body else body)
    if status == 200:
        rows.append(
            (
                short(body),
                status,
                "",
                f"{answer['usage']['completion_tokens']} tokens",
                answer["choices"][0]["finish_reason"],
            )
        )
    else:
        error = answer["error"]
        rows.append((short(body), status, error["type"], error["param"] or "", ""))
        said.append((short(body), error["message"]))
lab.table(rows, "body", "status", "type", "blamed / got", "")

got = {row[0]: row[1:4] for row in rows}
lab.claim(
    "500 tokens behind 20 are cut to the 492 that are left, 513 are refused",
    got['{"prompt": [20 tokens], "max_tokens": 500}'][2] == "492 tokens"
    and got['{"prompt": [20 tokens], "max_tokens": 513}'][0] == 400,
)
lab.claim(
    "an unknown field is ignored, a known one that is not built is refused",
    (got['{"prompt": "x", "echoo": true}'][0], got['{"prompt": "x", "suffix": "y"}'][0]) == (200, 400),
)
status = {n: got[f'{{"prompt": [20 tokens], "max_tokens": {n}}}'][0] for n in (500, 512, 513, 0)}
lab.compare(max_tokens_500=status[500], max_tokens_512=status[512], max_tokens_513=status[513], max_tokens_0=status[0])

# %% [markdown]
# `max_tokens` is cut to what is left of the context (see the body with 500), but above the context it is an error: that cannot be meant. A field that nobody knows (`echoo`) is ignored, as in vLLM; a known one
# that is not built (`suffix`) is refused, because ignoring it would silently give another answer.
#
# The messages say what is allowed:

# %% tags=["today"]
for body, message in said:
    print(f"{body}\n    {message}")

# %% [markdown]
# Beside bodies: routes, methods, and what is not JSON.

# %% tags=["today"]
rows = [
    ("GET /v1/nothing", *server.ask("/v1/nothing")),
    ("GET /v1/completions", *server.ask("/v1/completions")),
    ("GET /v1/models/gpt-3", *server.ask("/v1/models/gpt-3")),
]
lab.table(
    [(what, status, answer["error"]["type"], answer["error"]["message"]) for what, status, answer in rows],
    "",
    "status",
    "type",
    "message",
)

# %% [markdown]
# ## The same in the trace
#
# A refused request has events of phase 6, and its answer (`http.response`, phase 9): nothing of phases 7 and 8 between them.

# %%
server.close()
from stagetrace import read_run

run = read_run(server.folder)
(first, *_) = run.named("request.validated")
print(*(event.console_line() for event in run.of_request(first.req)[:6]), sep="\n")
refused = run.named("request.refused")
print(
    f"\n{len(refused)} refused; phases that they reached:",
    sorted({e.phase for r in refused if r.req for e in run.of_request(r.req)}),
)
lab.claim(
    "no refused request reached phases 7 and 8",
    not {7, 8} & {e.phase for r in refused if r.req for e in run.of_request(r.req)},
)

# %% [markdown] tags=["exercise"]
# ## Exercise: who is to blame
#
# Write `blame(fields)`. `fields` is a dictionary that may hold `temperature`, `top_k`, `top_p`, `min_p`, `max_tokens`, `logprobs`, `stop` (a list), `n`; what is missing has its default: temperature 1.0, top_k 0, top_p 1.0,
# min_p 0.0, max_tokens 16, logprobs None, stop [], n 1. Return the name of the first field that is impossible, in this order, or None:
#
# | field | allowed |
# |---|---|
# | temperature | 0 to 2 |
# | top_k | -1, 0, or at least 1 |
# | top_p | above 0, at most 1 |
# | min_p | 0 to 1 |
# | max_tokens | None, or at least 1 |
# | logprobs | None, or 0 to 20 |
# | n | 1 to 128; and 1 when the temperature is below 1e-5, since all answers would be equal |
# | stop | at most 4 strings, none empty |
#
# Numbers may be NaN, which is impossible everywhere. The real part is [`SamplingParams`](../stage03_engine/sampling_params.py).


# %% tags=["exercise"]
def blame(fields: dict[str, object]) -> str | None:
    """The name of the first impossible field, in the order of the table, or None."""
    raise NotImplementedError


# %% tags=["check"]
import random

from stage03_engine.errors import InvalidRequestError
from stage03_engine.sampling_params import SamplingParams


def real_blame(fields):
    try:
        SamplingParams(**fields)
    except InvalidRequestError as error:
        return error.param


VALUES = {
    "temperature": [0.0, 1e-6, 1e-5, 1.0, 2.0, 2.01, -0.1, float("nan")],
    "top_k": [-2, -1, 0, 1, 50],
    "top_p": [0.0, 0.01, 1.0, 1.01, float("nan")],
    "min_p": [-0.1, 0.0, 1.0, 1.1, float("nan")],
    "max_tokens": [None, -1, 0, 1, 16],
    "logprobs": [None, -1, 0, 20, 21],
    "stop": [[], ["a"], ["a", ""], ["a"] * 4, ["a"] * 5],
    "n": [0, 1, 2, 128, 129],
}


def case(seed):
    rng = random.Random(seed)
    return ({name: rng.choice(values) for name, values in VALUES.items() if rng.random() < 0.25},)


passed = lab.check(blame, real_blame, map(case, range(4000)))
