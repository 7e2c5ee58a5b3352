"""What callers ask for, read and checked: prompts, how to sample their answers, and their sessions."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..kvstore.hashing import as_tokens
from ..tiers.errors import ConfigError, RequestError
from ..tiers.settings import expect_text, expect_type, shown
from .loader import LoadedModel
from .sampler import SamplingParams

__all__ = ["Prompt", "PromptReader", "as_params", "as_prompts", "names_of", "params_of"]

_PROMPT_KINDS: Final = "a prompt is text, token ids, or messages with role and content"

Prompt: TypeAlias = "str | Many[int] | Many[Mapping[str, str]] | npt.NDArray[np.int32]"
"""Text, token ids, or the messages of a chat."""


def as_prompts(prompts: Prompt | Many[Prompt]) -> list[Prompt]:
    """One prompt, or many, as a list.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(prompts, str | np.ndarray):
        return [prompts]
    if not isinstance(prompts, Many):
        raise RequestError(f"{_PROMPT_KINDS}, not {type(prompts).__name__}")
    if len(prompts) and isinstance(prompts[0], int | np.integer | Mapping):
        return [cast(Prompt, prompts)]
    return list(cast("Many[Prompt]", prompts))


def as_params(params: object) -> SamplingParams:
    """Sampling parameters, if that is what they are.

    Raises:
        ConfigError: they are not.
    """
    return expect_type("params", params, SamplingParams, "SamplingParams")


def params_of(params: object, count: int) -> list[SamplingParams]:
    """Sampling parameters of each of `count` prompts.

    Raises:
        ConfigError: they are of a wrong type.
        RequestError: they are not as many.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Many):
        raise ConfigError("params", f"must be SamplingParams, a list of them, or None, got {shown(params)}")
    of_each = [as_params(one) for one in params]
    if len(of_each) != count:
        raise RequestError(f"{count} prompts with {len(of_each)} sampling params")
    return of_each


def names_of(sessions: object, count: int) -> list[str | None]:
    """The session of each of `count` prompts.

    Raises:
        ConfigError: they are of a wrong type.
        RequestError: they are not as many, or one is named twice.
    """
    if sessions is None:
        return [None] * count
    if not isinstance(sessions, Many) or isinstance(sessions, str):
        raise ConfigError("sessions", f"must be a list of ids, one for each prompt, got {shown(sessions)}")
    names = [None if name is None else expect_text("sessions", name) for name in sessions]
    if len(names) != count:
        raise RequestError(f"{count} prompts with {len(names)} sessions")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise RequestError(f"sessions: {name!r} is named twice; a conversation takes one turn at a time")
        if name is not None:
            seen.add(name)
    return names


class PromptReader:
    """Reads prompts for one model.

    Args:
        loaded: the model whose tokenizer and vocabulary count.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def tokens(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """The token ids of a prompt, int32.

        Raises:
            RequestError: it is empty, not to be understood, or the model does not know its tokens.
        """
        if isinstance(prompt, str):
            return self._in_vocabulary(self._encode(prompt))
        if not isinstance(prompt, Many | np.ndarray):
            raise RequestError(f"{_PROMPT_KINDS}, not {type(prompt).__name__}")
        if isinstance(prompt, Many) and prompt and isinstance(prompt[0], Mapping):
            return self._in_vocabulary(self._loaded.encode_chat([_as_message(one) for one in prompt]))
        try:
            tokens = np.asarray(prompt)
        except ValueError as error:
            raise RequestError(f"{_PROMPT_KINDS}: {error}") from error
        if tokens.ndim == 1 and not len(tokens):
            raise RequestError("the prompt is empty")
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise RequestError(_PROMPT_KINDS)
        return self._in_vocabulary(tokens)

    def _encode(self, text: str) -> list[int]:
        if self._loaded.tokenizer is None:
            raise RequestError(f"{self._loaded.name} has no tokenizer; prompt it with token ids")
        try:
            ids: list[int] = self._loaded.tokenizer.encode(text)
        except (TypeError, ValueError) as error:
            # What holds half a surrogate pair is a str, but no text.
            raise RequestError(f"the prompt cannot be tokenized: {error}") from error
        return ids

    def _in_vocabulary(self, tokens: Many[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """The tokens as an array. A tokenizer may know tokens that its model does not."""
        tokens = np.asarray(tokens, dtype=None if len(tokens) else np.int32)
        vocabulary = self._loaded.config.vocab_size
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocabulary):
            raise RequestError(f"token ids must be from 0 to {vocabulary - 1}")
        return as_tokens(tokens.astype(np.int32))


def _as_message(message: object) -> Mapping[str, str]:
    if not isinstance(message, Mapping):
        raise RequestError("a chat is a list of messages, mappings with role and content")
    return message
