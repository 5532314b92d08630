"""From what a client wrote to token ids."""

from __future__ import annotations

from typing import Any, TypeGuard

from app.protocol.requests import ChatMessage
from app.validation.limits import Limits
from app.validation.parsing import must_be, refuse
from app.validation.unsupported import MESSAGE, refuse_unsupported
from model_runner.errors import ContextLengthExceeded
from model_runner.tokenizer import Tokenizer

PROMPT = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def read_prompts(given: Any, limits: Limits, tokenizer: Tokenizer) -> tuple[list[list[int]], list[str]]:
    """The prompts in token ids, and in text. A prompt given in token ids has "" for a text.

    Raises InvalidRequest, or ContextLengthExceeded for a text that could not fit however it were tokenised.
    """
    if isinstance(given, str):
        return [_encode(given, "prompt", limits, tokenizer)], [given]
    if not isinstance(given, list) or not given:
        must_be("prompt", PROMPT, given, "invalid_type")
    if _is_int(given[0]):
        return [_read_token_ids(given, "prompt", limits)], [""]
    if len(given) > limits.max_prompts:
        refuse("prompt", f"`prompt` may hold at most {limits.max_prompts} prompts, not {len(given)}.")
    prompts, texts = [], []
    for index, item in enumerate(given):
        param = f"prompt[{index}]"
        if isinstance(item, str) and isinstance(given[0], str):
            prompts.append(_encode(item, param, limits, tokenizer))
            texts.append(item)
        elif isinstance(item, list) and isinstance(given[0], list):
            prompts.append(_read_token_ids(item, param, limits))
            texts.append("")
        else:
            kinds = "a string or a list of token ids, all of them alike"
            must_be(param, kinds, item, "invalid_type")
    return prompts, texts


# Names that are the conversation's own, or another parameter's.
_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


def read_messages(
    messages: list[ChatMessage], variables: dict[str, Any], limits: Limits, tokenizer: Tokenizer
) -> list[int]:
    """The conversation in token ids, as the model's own chat template writes it, which may read `variables`.

    Raises InvalidRequest, or ContextLengthExceeded for one that could not fit however it were tokenised.
    """
    plain = [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    for name in variables:
        if name in _RESERVED:
            refuse(
                f"chat_template_kwargs.{name}", f"`chat_template_kwargs` can't set `{name}`; leave it out."
            )
    text = tokenizer.apply_chat_template(plain, variables)
    _refuse_hopeless(text, "messages", limits, tokenizer)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    if not prompt:
        refuse("messages", "`messages` must hold some text; the chat template makes nothing of these.")
    return prompt


def _read_message(message: ChatMessage, path: str) -> dict[str, str]:
    refuse_unsupported(message.model_extra, MESSAGE, f"{path}.")
    content = _read_content(message.content, f"{path}.content")
    if content is None and message.role == "assistant":
        content = message.refusal
    if content is None:
        must_be(f"{path}.content", "a string or a list of parts of type text", None, "invalid_type")
    # Templates know the older name: "developer" is what OpenAI calls the system's messages today.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content, **({"name": message.name} if message.name else {})}


def _read_content(content: Any, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        must_be(path, "a string or a list of parts of type text", content, "invalid_type")
    texts = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        if not isinstance(part, dict):
            must_be(where, "an object with a `type` and a `text`", part, "invalid_type")
        if part.get("type") != "text":
            must_be(f"{where}.type", "text, the only kind of part that is supported", part.get("type"))
        if not isinstance(part.get("text"), str):
            must_be(f"{where}.text", "a string", part.get("text"), "invalid_type")
        texts.append(part["text"])
    return "\n".join(texts)


def _encode(text: str, param: str, limits: Limits, tokenizer: Tokenizer) -> list[int]:
    if not text:
        must_be(param, "a string that is not empty", text)
    _refuse_hopeless(text, param, limits, tokenizer)
    token_ids = tokenizer.encode_prompt(text)
    if not token_ids:
        refuse(
            param, f"`{param}` must be a string with at least one token; the tokenizer makes nothing of it."
        )
    return token_ids


def _refuse_hopeless(text: str, param: str, limits: Limits, tokenizer: Tokenizer) -> None:
    least = tokenizer.min_token_count(text)
    if least >= limits.max_model_len:
        message = (
            f"This model's maximum context length is {limits.max_model_len} tokens. "
            f"However, your {_noun(param)} resulted in at least {least} tokens. "
            f"Please reduce the length of the {_noun(param)}."
        )
        raise ContextLengthExceeded(message, param=param)


def _read_token_ids(given: list[Any], param: str, limits: Limits) -> list[int]:
    allowed = f"a list of token ids, integers from 0 to {limits.vocab_size - 1}, that is not empty"
    if not given:
        must_be(param, allowed, given)
    for index, token_id in enumerate(given):
        if not _is_int(token_id):
            must_be(f"{param}[{index}]", "a token id like the others", token_id, "invalid_type")
        if not 0 <= token_id < limits.vocab_size:
            must_be(f"{param}[{index}]", f"a token id from 0 to {limits.vocab_size - 1}", token_id)
    return given


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _noun(param: str) -> str:
    return "messages" if param == "messages" else "prompt"
