"""What a request may be, given the model and the settings."""

from __future__ import annotations

from dataclasses import dataclass

from model_runner.errors import ContextLengthExceeded


@dataclass(frozen=True, slots=True)
class Limits:
    served_model_name: str
    max_model_len: int  # tokens, prompt and completion together
    vocab_size: int  # of the model: token ids are below it
    default_max_tokens: int  # of a chat that names none
    max_prompts: int

    def resolve_max_tokens(
        self, requested: int | None, prompt_tokens: int, *, default: int, param: str
    ) -> int:
        """The tokens to generate after the longest prompt: what was asked, or the default.

        Raises ContextLengthExceeded, in OpenAI's words, which clients search for the figures. A prompt that
        is only scored needs room for one token all the same.
        """
        room = self.max_model_len - prompt_tokens
        if room >= max(1, requested or 0):
            return min(default, room) if requested is None else requested
        noun = "messages" if param == "messages" else "prompt"
        opening = f"This model's maximum context length is {self.max_model_len} tokens. However, "
        if requested:
            message = (
                f"{opening}you requested {prompt_tokens + requested} tokens ({prompt_tokens} in the {noun}, "
                f"{requested} in the completion). Please reduce the length of the {noun} or completion."
            )
        else:
            message = (
                f"{opening}your {noun} resulted in {prompt_tokens} tokens. "
                f"Please reduce the length of the {noun}."
            )
        raise ContextLengthExceeded(message, param=param)
