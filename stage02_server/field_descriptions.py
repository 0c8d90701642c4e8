"""What each field of a request means, in one sentence: for /openapi.json and the page /docs.

Several requests have a field of the same name, so the table is by name; `Model.field` goes before it.
"""

from __future__ import annotations

from typing import Any

FIELDS = {
    # What to work on
    "model": "One of the names that /v1/models tells; the served model if not given.",
    "prompt": "A text, a list of token ids, or a list of either: each is a prompt of its own.",
    "messages": "The chat so far, the oldest message first.",
    "input": "A text, a list of token ids, or a list of either.",
    "ResponsesRequest.input": "A text, or the items of a conversation.",
    "tokens": "Token ids.",
    "file": "The sound: WAV, FLAC, OGG or MP3.",
    "request_ids": "Ids of answers whose requests shall end.",
    # How the next token is chosen
    "temperature": "0 takes the likeliest token each time; higher values draw more freely.",
    "top_p": "Draw only from the likeliest tokens that together have this probability.",
    "top_k": "Draw only from so many of the likeliest tokens; 0 and -1 take all.",
    "min_p": "Draw only from tokens that have at least this share of the likeliest one's probability.",
    "seed": "The same seed gives the same answer, whatever else the server does.",
    "frequency_penalty": "Above 0: a token becomes less likely each time that the answer has it.",
    "presence_penalty": "Above 0: a token becomes less likely once the answer has it.",
    "repetition_penalty": "Above 1: tokens of the prompt and of the answer become less likely.",
    "logit_bias": "Token id to a number that is added to its logit; -100 forbids it, 100 all but forces it.",
    "allowed_token_ids": "Nothing but these tokens may be written.",
    "bad_words": "Words that may not be written.",
    "vllm_xargs": "Values for logits processors of your own.",
    "n": "How many answers to each prompt.",
    "best_of": "So many answers are made, and the n likeliest of them returned.",
    "use_beam_search": "Look for the likeliest whole answers, n at a time, instead of drawing tokens.",
    "length_penalty": "Beam search: above 1 prefers long answers, below 1 short ones.",
    "early_stopping": "Beam search: end when n answers are complete, without looking for better ones.",
    # When an answer ends
    "max_tokens": "Most tokens of an answer; what the context has left if that is less.",
    "max_completion_tokens": "OpenAI's newer name of max_tokens.",
    "max_output_tokens": "Most tokens of the answer, its reasoning included.",
    "min_tokens": "Before so many tokens the answer does not end.",
    "stop": "Up to four texts; the answer ends before the first of them that it would have.",
    "stop_token_ids": "Tokens that end the answer.",
    "include_stop_str_in_output": "Leave the text that ended the answer in it.",
    "ignore_eos": "Write on behind the end-of-text token.",
    "repetition_detection": "End an answer that goes round in circles.",
    "max_pattern_size": "Tokens of the longest circle to look for.",
    "min_pattern_size": "Tokens of the shortest circle to look for.",
    "min_count": "How many times the same tokens must have come one after the other.",
    # What form the answer has
    "response_format": "Text, a JSON object, or JSON that follows a schema.",
    "structured_outputs": "One of json, regex, choice, grammar and json_object, which the answer must follow.",
    "guided_json": "A JSON schema that the answer must follow.",
    "guided_regex": "A regular expression that the answer must match.",
    "guided_choice": "Texts, of which the answer must be one.",
    "guided_grammar": "Rules in GBNF that the answer must follow.",
    # How the answer is told
    "stream": "Send the answer piece by piece while it is made, as server-sent events.",
    "stream_options": "What a stream tells beside the text.",
    "stream_interval": "Tokens from one chunk of the stream to the next.",
    "include_usage": "End the stream with the number of tokens.",
    "continuous_usage_stats": "Tell the number of tokens in every chunk.",
    "echo": "The answer begins with the prompt.",
    "ChatCompletionRequest.echo": "With continue_final_message: the answer begins with that message's text.",
    "logprobs": "The log-probability of each token, and of so many of the likeliest ones in its place.",
    "ChatCompletionRequest.logprobs": "Tell the log-probability of each token.",
    "top_logprobs": "With logprobs: those of so many of the likeliest tokens as well.",
    "prompt_logprobs": "The same for the tokens of the prompt.",
    "logprob_token_ids": "With logprobs: tell those of these tokens instead of the likeliest ones'.",
    "return_tokens_as_token_ids": "In logprobs, call a token token_id:5 instead of by its text.",
    "return_token_ids": "Tell the token ids of the prompt and of the answer.",
    "return_prompt_text": "Tell what the chat template made of the messages.",
    "return_token_strs": "Tell the text of each token.",
    "skip_special_tokens": "Leave tokens such as the end of text out of the answer.",
    "spaces_between_special_tokens": "Put spaces between special tokens.",
    # The prompt
    "add_special_tokens": "Add the tokens that the tokenizer puts around a text.",
    "truncate_prompt_tokens": "Cut a longer prompt to so many tokens; -1: to what the context holds.",
    "truncation_side": "Which side of the prompt is cut off.",
    "truncation": 'With "auto", a prompt that is too long loses its beginning.',
    "add_generation_prompt": "Let the template end with the beginning of an answer.",
    "continue_final_message": "The answer goes on with the last message.",
    "chat_template": "A Jinja template for this request; needs --trust-request-chat-template.",
    "chat_template_kwargs": "Variables for the chat template.",
    "documents": "Texts that the chat template may show to the model.",
    "RerankRequest.documents": "The texts to put in order.",
    "ScoreRequest.documents": "Another name of text_2.",
    "reasoning_effort": "How much the model shall think; the chat template sees it.",
    "include_reasoning": "Tell what --reasoning-parser takes for reasoning.",
    # Tools
    "tools": "Functions that the model may call.",
    "ChosenTool.tools": "The tools that may be called.",
    "tool_choice": "none, auto, required, or one function by its name.",
    "parallel_tool_calls": "Whether an answer may have more than one call.",
    "max_tool_calls": "Most calls of tools that the server runs; it runs none.",
    "function": "The function.",
    "parameters": "A JSON schema of the function's arguments.",
    "arguments": "The arguments of the call, as JSON in a text.",
    "description": "What it is for; the chat template may show it to the model.",
    "strict": "Accepted; a grammar is used where tool_choice or the format asks for one.",
    "mode": "auto or required.",
    # Messages and items
    "role": "Who speaks: system, developer, user, assistant or tool.",
    "content": "A text, or a list of parts.",
    "text": "The text.",
    "ResponsesRequest.text": "What form the text of the answer has.",
    "name": "Its name.",
    "ChatMessageParam.name": "Who of several speakers of this role.",
    "type": "What it is.",
    "id": "Its id.",
    "tool_calls": "The calls that this answer made.",
    "tool_call_id": "The call whose result this message is.",
    "call_id": "Which call; its result has the same.",
    "output": "The result of a call.",
    "reasoning": "What the model thought before it answered.",
    "ResponsesRequest.reasoning": "How much the model shall think.",
    "reasoning_content": "An older name of reasoning.",
    "thinking": "The text of a part that is reasoning.",
    "refusal": "The text of a part in which a model refused.",
    "summary": "A summary of the reasoning.",
    "ReasoningConfig.summary": "Summaries are not written.",
    "generate_summary": "An older name of summary.",
    "encrypted_content": "Nothing is encrypted here.",
    "effort": "How much the model shall think; the chat template sees it.",
    # The Responses API
    "instructions": "A system message for this response only.",
    "previous_response_id": "The stored response whose conversation goes on.",
    "store": "Keep the response for later requests.",
    "background": "Answer at once, and work on; GET tells when it is done.",
    "include": "What the answer shall hold besides.",
    "metadata": "Up to 16 texts by name, which the answer repeats.",
    "service_tier": "Accepted; there is one kind of service.",
    "format": "Text, a JSON object, or JSON that follows a schema.",
    "verbosity": "Accepted at its neutral value.",
    "schema": "The JSON schema.",
    # Vectors, scores and classes
    "encoding_format": "Numbers as a list, or as bytes in base64.",
    "dimensions": "Keep so many of a vector's first numbers.",
    "normalize": "Scale the vector to length 1.",
    "use_activation": "Scale vectors to length 1; make probabilities of classes.",
    "task": "What to make of the hidden states.",
    "query": "What the documents are compared with.",
    "top_n": "Return so many of the best.",
    "return_documents": "Repeat the documents in the answer.",
    "text_1": "One text or several.",
    "text_2": "What they are compared with: the same number, or any number with one.",
    "queries": "Another name of text_1.",
    "items": "Another name of text_2.",
    "data_1": "Another name of text_1.",
    "data_2": "Another name of text_2.",
    # Sound
    "language": "The language that is spoken, such as en; the model says it if not given.",
    "timestamp_granularities[]": "segment, word, or both: whose times to tell, with verbose_json.",
    "stream_include_usage": "End the stream with the usage.",
    "stream_continuous_usage_stats": "Tell the usage in every chunk.",
    # Around the request
    "priority": "With --scheduling-policy priority: smaller goes first.",
    "cache_salt": "Only requests with the same salt share cached prefixes.",
    "request_id": "A part of the answer's id.",
    "user": "Accepted, and not used.",
    "config_format": "text or json.",
    "response_id": "The id of a stored response.",
    "starting_after": "The number of an event; those behind it are sent.",
    # Errors
    "error": "What is wrong.",
    "message": "What is wrong, in words.",
    "param": "The field that is to blame, if it is one.",
    "code": "The HTTP status.",
    "ErrorInfo.type": "The kind of error.",
}


def describe_fields(description: dict[str, Any]) -> None:
    """Put the sentences into an OpenAPI description: at fields of shapes, of forms, and at parameters of routes."""
    for name, shape in description["components"]["schemas"].items():
        _describe(name, shape)
    for operations in description["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in FIELDS:
                    parameter.setdefault("description", FIELDS[parameter["name"]])
            for body in operation.get("requestBody", {}).get("content", {}).values():
                _describe("", body["schema"])


def _describe(name: str, shape: dict[str, Any]) -> None:
    for field, schema in shape.get("properties", {}).items():
        sentence = FIELDS.get(f"{name}.{field}", FIELDS.get(field))
        if sentence is not None:
            schema.setdefault("description", sentence)
