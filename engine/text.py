"""Text of a sequence as its tokens come: whole characters only, cut before a stop string."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import numpy.typing as npt

from .sequence import FinishReason, Sequence

__all__ = ["TextStream", "Texts"]


class TextStream:
    """Turns a growing list of output tokens into text.

    Tokens may end in the middle of a character, and a token's text may depend on the one before it, so
    each new piece is the difference of two decodings of a short window (the way of Hugging Face's
    text-generation-inference).

    Args:
        tokenizer: transformers' tokenizer.
        stop: strings that end the text; they are not part of it.
    """

    def __init__(self, tokenizer: Any, stop: Many[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        """Whether a stop string was met."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._hold = max((len(word) for word in self._stop), default=1) - 1
        self._window = 0
        self._read = 0
        self._certain = 0
        self._taken = 0

    def feed(self, tokens: npt.NDArray[np.int32], *, last: bool = False) -> None:
        """Read on.

        Args:
            tokens: all output tokens so far.
            last: no more will come.
        """
        before = self._decode(tokens[self._window : self._read])
        now = self._decode(tokens[self._window :])
        if len(now) > len(before) and (last or not now.endswith("\ufffd")):
            self._add(now[len(before) :])
            self._window, self._read = self._read, len(tokens)
        # What may be the beginning of a stop string is held back until it is known not to be.
        held = 0 if last or self.stopped else self._hold
        self._certain = max(self._certain, len(self.text) - held)

    def take(self) -> str:
        """The text that became certain since the last call."""
        piece = self.text[self._taken : self._certain]
        self._taken = self._certain
        return piece

    def _add(self, piece: str) -> None:
        if self.stopped:
            return
        searched = max(0, len(self.text) - self._hold)
        self.text += piece
        # The one that is completed first ends the text, in whatever pieces it came.
        found = [(at + len(word), at) for word in self._stop if (at := self.text.find(word, searched)) >= 0]
        if found:
            self.text = self.text[: min(found)[1]]
            self.stopped = True

    def _decode(self, tokens: npt.NDArray[np.int32]) -> str:
        text: str = self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return text


class Texts:
    """The texts of running sequences that are read as their tokens come: for streams and stop strings.

    Args:
        tokenizer: transformers' tokenizer; None where the model has none, and no text is watched.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._watched: dict[int, tuple[Sequence, TextStream]] = {}

    def watch(self, sequence: Sequence) -> TextStream:
        """Read a sequence's text as it comes."""
        _, text = self._watched.setdefault(
            sequence.id, (sequence, TextStream(self._tokenizer, sequence.params.stop))
        )
        return text

    def read(self, tokens_of: Callable[[Sequence], npt.NDArray[np.int32]]) -> list[Sequence]:
        """Read on; returns the running sequences that have met a stop string.

        Args:
            tokens_of: all tokens known of a sequence.
        """
        stopped = []
        for sequence, text in self._watched.values():
            if sequence.row is not None:
                text.feed(tokens_of(sequence)[sequence.num_prompt :])
                if text.stopped:
                    stopped.append(sequence)
        return stopped

    def end(self, sequence: Sequence) -> None:
        """A sequence is over: keep its whole text, if it was watched."""
        if sequence.id not in self._watched:
            return
        _, text = self._watched.pop(sequence.id)
        text.feed(sequence.output, last=True)
        sequence.text = text.text
        # Its last token may have both ended a stop string and been the last that it may have.
        if text.stopped and sequence.finish_reason is FinishReason.LENGTH:
            sequence.finish_reason = FinishReason.STOP

    def text_of(self, sequence: Sequence) -> str:
        """The text of a sequence that is over; empty where there is no tokenizer."""
        if sequence.text is not None:
            return sequence.text
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(sequence.output.tolist(), skip_special_tokens=True)
        return text
