"""Tokens of a text, by a tokenizer of this machine: nothing is fetched."""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

__all__ = ["tokens_of"]

_MOST_TOKENIZERS = 4


def tokens_of(text: str, tokenizer: str) -> list[int]:
    """The token ids of a text, without such as stand for its beginning or end.

    Args:
        tokenizer: a name that the local cache of the Hub has. No path: who asks need not be one who may read
            this machine's files.

    Raises:
        HTTPException: there is no such tokenizer, or the package is missing that reads it.
    """
    tokens: list[int] = _opened(tokenizer).encode(text, add_special_tokens=False).ids
    return tokens


@lru_cache(_MOST_TOKENIZERS)
def _opened(name: str) -> Any:
    try:
        made: Any = import_module("tokenizers").Tokenizer
    except ImportError as error:
        raise HTTPException(
            HTTPStatus.CONFLICT, "text needs the package tokenizers (pip install tokenizers); tokens do not"
        ) from error
    file = _cached(name)
    try:
        return made.from_file(str(file))
    except Exception as error:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"{name} has no tokenizer that can be read") from error


def _cached(name: str) -> Path:
    """The file of a name in the local cache of the Hub."""
    absent = HTTPException(HTTPStatus.NOT_FOUND, f"this machine has no tokenizer {name}")
    try:
        found = import_module("huggingface_hub").try_to_load_from_cache(name, "tokenizer.json")
    except ImportError as error:
        raise absent from error
    except ValueError as error:  # it is no name
        raise absent from error
    if not isinstance(found, str):
        raise absent
    return Path(found)
