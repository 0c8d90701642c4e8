"""lm-evaluation-harness over HTTP gets what transformers has on the same weights: log-likelihoods, and greedy answers to chats."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_under_test import ServerProcess

import stage03_engine

MODEL = str(Path(stage03_engine.__file__).parent / "bundled" / "gpt2-tiny")
TOLERANCE = 1e-3  # of the sum over a continuation
PAIRS = [
    ("To be, or not to", " be: that is the question"),
    ("ROMEO:\n", "What light through yonder window breaks?"),
    ("", "First Citizen:"),
    ("Now is the winter of our discontent", " made glorious summer"),
    ("a " * 60, "b"),
]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role | upper }}:\n{{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
QUESTIONS = ["Who is there?", "What say you to a letter from your friends?", "Speak!", "How now, my lord?"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    pytest.importorskip("lm_eval")
    server = ServerProcess("gpt2-tiny", "--port", "0", "--dtype", "float32", "--chat-template", CHAT_TEMPLATE)
    server.wait_until_ready()
    yield server
    server.close()


def likelihoods(pairs: list[list[int]]) -> list[tuple[float, bool]]:
    """(sum of log-probabilities, is it what greedy decoding gives) of each continuation, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    results = []
    for context, continuation in pairs:
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        rows = logits.log_softmax(-1)
        picked = rows[torch.arange(len(continuation)), torch.tensor(continuation)]
        results.append((picked.sum().item(), rows.argmax(-1).tolist() == continuation))
    return results


def test_log_likelihoods(server: ServerProcess) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    os.environ.setdefault("OPENAI_API_KEY", "none")
    client = LocalCompletionsAPI(
        model="gpt2-tiny", base_url=server.url + "/v1/completions", tokenizer=MODEL,
        tokenizer_backend="huggingface", num_concurrent=1, batch_size=3,
    )  # fmt: skip
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    answers = client.loglikelihood(asked, disable_tqdm=True)
    tokens = []
    for context, continuation in PAIRS:
        if context:
            tokens.append(client._encode_pair(context, continuation))
        else:
            tokens.append(([client.prefix_token_id], client.tok_encode(continuation)))
    for (mine, greedy), (true, is_greedy), pair in zip(answers, likelihoods(tokens), PAIRS, strict=True):
        assert mine == pytest.approx(true, abs=TOLERANCE), pair
        assert greedy == is_greedy, pair


def greedy_answers(chats: list[list[dict[str, str]]], max_tokens: int, end: str) -> list[str]:
    """What transformers says to each, up to `end`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = []
    for chat in chats:
        prompt = tokenizer.apply_chat_template(
            chat, chat_template=CHAT_TEMPLATE, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        texts.append(answer.partition(end)[0])
    return texts


def test_chats(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    from lm_eval import simple_evaluate

    system = "Answer in verse."
    chats = [[{"role": "system", "content": system}, {"role": "user", "content": ask}] for ask in QUESTIONS]
    wanted = greedy_answers(chats, 24, "\n\n")
    assert len(set(wanted)) > 1
    rows = [json.dumps({"ask": ask, "answer": answer}) for ask, answer in zip(QUESTIONS, wanted, strict=True)]
    (tmp_path / "questions.json").write_text("\n".join(rows), encoding="utf-8")
    task = {
        "task": "verses", "dataset_path": "json", "dataset_kwargs": {"data_files": str(tmp_path / "questions.json")},
        "test_split": "train", "output_type": "generate_until", "doc_to_text": "{{ask}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24}, "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    result = simple_evaluate(
        model="local-chat-completions", tasks=[task], apply_chat_template=True, system_instruction=system,
        model_args={"model": "gpt2-tiny", "base_url": server.url + "/v1/chat/completions"}, bootstrap_iters=0,
    )  # fmt: skip
    samples = sorted(result["samples"]["verses"], key=lambda sample: sample["doc_id"])
    assert [sample["resps"][0][0] for sample in samples] == wanted
    assert result["results"]["verses"]["exact_match,none"] == 1.0
