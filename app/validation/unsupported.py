"""Parameters that other servers know and this one doesn't support: refused by name, never ignored, unless the
value asks for nothing. Fields that are in no table are unknown, and accepted; `metadata`, `prompt_cache_key`
and `safety_identifier` are such, for they change nothing in an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.validation.parsing import refuse, shown

# name -> the values that ask for nothing (null never asks for anything).
Neutral = Mapping[str, tuple[Any, ...]]

_BOTH: Neutral = {
    # OpenAI's
    "response_format": ({"type": "text"},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prediction": (),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # without tools there is nothing to call
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    # vLLM's and SGLang's
    "use_beam_search": (False,),
    "length_penalty": (1, 0),  # of beams, and there are none
    "early_stopping": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "no_stop_trim": (False,),
    "stop_regex": ("", []),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "structured_outputs": ({},),
    "structural_tag": (),
    "json_schema": ({}, ""),
    "regex": ("",),
    "ebnf": ("",),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    "prompt_embeds": ([],),
    "thinking_token_budget": (),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "lora_path": ("",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": ("",),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    # llama.cpp's and others'
    "grammar": ("",),
    "n_predict": (),
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "n_probs": (0,),
}
COMPLETION: Neutral = {
    **_BOTH,
    "chat_template_kwargs": ({},),
    "top_logprobs": (0,),
    "add_special_tokens": (True,),
}
CHAT: Neutral = {**_BOTH, "echo": (False,), "add_special_tokens": (False,)}
STREAM_OPTIONS: Neutral = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
MESSAGE: Neutral = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
    "prefix": (False,),
}


def refuse_unsupported(given: Mapping[str, Any] | None, neutral: Neutral, path: str = "") -> None:
    """Raises InvalidRequest for the first known parameter in `given` whose value asks for something."""
    for name, value in (given or {}).items():
        allowed = neutral.get(name)
        if allowed is None or value is None or any(_same(value, each) for each in allowed):
            continue
        param = path + name
        hint = f", unless it is {' or '.join(map(_as_json, allowed))}" if allowed else ""
        message = f"`{param}` is not supported{hint}; leave it out."
        refuse(param, message, "unsupported_parameter")


def refuse_best_of(given: Mapping[str, Any] | None, n: int) -> None:
    """The best n of n are all of them; any other `best_of` asks for choices that are thrown away."""
    best_of = (given or {}).get("best_of")
    if best_of is not None and not _same(best_of, n):
        message = f"`best_of` is not supported, unless it is equal to `n` (here {n}); leave it out."
        refuse("best_of", message, "unsupported_parameter")


def _same(value: Any, neutral: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _as_json(value: Any) -> str:
    if isinstance(value, dict) and value:
        return ", ".join(f'{{"{key}": {_as_json(item)}}}' for key, item in value.items())
    if isinstance(value, list) and value:
        return f"[{', '.join(map(_as_json, value))}]"
    return {"": '""', "[]": "[]", "{}": "{}"}.get(str(value), shown(value))
