"""LLM: the engine as its users see it. Prompts in, text out; KV in three tiers underneath."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from ..kvstore.hashing import ChainIdentity, as_tokens
from ..kvstore.host import HostStore
from ..kvstore.session import SessionRecord, SleepingSequence
from ..kvstore.store import TieredStore
from ..tiers.cold import ColdTier
from ..tiers.errors import ClosedError, ConfigError, RecordError, RequestError
from ..tiers.memory import memory_headroom
from ..tiers.settings import expect_integer
from .loader import LoadedModel, find_device, load_model
from .runner import Runner
from .sampler import SamplingParams
from .scheduler import Scheduler
from .sequence import CachedTokens, FinishReason, Sequence, SequenceState
from .text import TextStream

__all__ = ["LLM", "Completion", "Prompt"]

_log = logging.getLogger(__name__)

_CPU_DEVICE_BYTES: Final = 256 << 20
_GPU_SHARE: Final = 0.85
_HOST_SHARE: Final = 0.25
_MIN_HOST_BYTES: Final = 64 << 20

_PROMPT_KINDS: Final = "a prompt is text, token ids, or messages with role and content"

Prompt: TypeAlias = "str | Many[int] | Many[Mapping[str, str]] | npt.NDArray[np.int32]"
"""Text, token ids, or the messages of a chat."""


@dataclass(frozen=True)
class Completion:
    """What became of a prompt.

    Attributes:
        text: the answer; empty where the model has no tokenizer.
        token_ids: its tokens, a stop token included.
        finish_reason: why it ended.
        prompt_tokens: tokens of the prompt.
        cached: how many of them were not computed, by tier.
        computed: tokens that were computed in chunks of its prompt; what was lost and computed again counts
            again.
        queue_seconds: from arrival until it was first scheduled.
        first_token_seconds: from arrival to its first token.
        seconds: from arrival to its end.
        preemptions: how often it was put to sleep to make room.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached: CachedTokens
    computed: int
    queue_seconds: float
    first_token_seconds: float
    seconds: float
    preemptions: int


@dataclass(frozen=True)
class _Session:
    """A conversation that is between two requests."""

    tokens: npt.NDArray[np.int32]
    sleeping: SleepingSequence


class LLM:
    """A model, its scheduler and a tiered store. One thread drives it.

    Args:
        model: what `load_model` takes, or a model that is loaded already.
        device: ``cpu``, ``cuda:N``, or ``auto``: where a loaded model is, else a GPU where there is one.
        dtype: what to compute in and keep KV in, see `load_model`.
        block_size: tokens per block.
        device_blocks: blocks of the device tier; or give
        device_bytes: its size. None for both: on a GPU 85% of what is free once the weights are there, on a
            CPU a quarter of a GiB.
        host_bytes: size of the host tier, 0 for none. None: a quarter of the memory that is available.
        cold: the cold tier, or None.
        max_sequences: sequences that run at a time.
        max_tokens: tokens of one sequence; None for what the model takes.
        step_tokens: tokens that one step computes at most; `max_sequences` where that is more.
        load_seconds: how long a request waits for blocks from the cold tier.
        tenant: salt that keeps this engine's KV apart from other tenants'.

    Raises:
        ConfigError: a value is out of range.
        ModelError: the model cannot be read.
        MemoryUnavailableError: a tier does not fit this machine.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        device: str = "auto",
        dtype: str = "auto",
        block_size: int = 16,
        device_blocks: int | None = None,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        cold: ColdTier | None = None,
        max_sequences: int = 64,
        max_tokens: int | None = None,
        step_tokens: int = 512,
        load_seconds: float = 5.0,
        tenant: bytes = b"",
    ) -> None:
        device = str(_device_of(device, model))
        expect_integer("step_tokens", step_tokens, 1)
        for name, value, least in (
            ("device_blocks", device_blocks, 1),
            ("device_bytes", device_bytes, 1),
            ("host_bytes", host_bytes, 0),
            ("max_tokens", max_tokens, 2),
        ):
            if value is not None:
                expect_integer(name, value, least)
        if not load_seconds >= 0:
            raise ConfigError("load_seconds", f"must not be negative, got {load_seconds!r}")
        self._loaded = (
            model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype, device=device)
        )
        positions = self._loaded.max_positions
        self.max_tokens = positions if max_tokens is None else max_tokens
        if not 1 < self.max_tokens <= positions:
            raise ConfigError(
                "max_tokens", f"must be between 2 and the model's {positions}, got {max_tokens!r}"
            )
        self.layout = self._loaded.model.kv_layout(block_size)
        self._identity = ChainIdentity(self._loaded.identity, tenant=tenant)
        blocks = self._device_blocks(device, device_blocks, device_bytes)
        host_bytes = _default_host_bytes() if host_bytes is None else host_bytes
        if cold is not None and not host_bytes:
            raise ConfigError("host_bytes", "a cold tier needs host memory above it")
        on_gpu = device if device != "cpu" else None
        with ExitStack() as undo:
            self.host = HostStore(host_bytes, cold=cold, device=on_gpu) if host_bytes else None
            if self.host is not None:
                undo.callback(self.host.close)
            self.store = TieredStore(
                self.layout,
                blocks,
                root=self._identity.root,
                host=self.host,
                device=device,
                max_sequences=max_sequences,
            )
            undo.pop_all()
        self._scheduler = Scheduler(
            self.store,
            max_sequences=max_sequences,
            max_tokens=self.max_tokens,
            step_tokens=max(step_tokens, max_sequences),
            load_seconds=load_seconds,
        )
        self._runner = Runner(self._loaded.model, self.store)
        self._sessions: dict[str, _Session] = {}
        self._texts: dict[int, tuple[Sequence, TextStream]] = {}
        self._next_id = 0
        self._driven = threading.Lock()
        self._closed = False

    @property
    def tokenizer(self) -> object:
        """transformers' tokenizer of the model, or None."""
        return self._loaded.tokenizer

    def encode_chat(self, messages: Many[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins, see `LoadedModel.encode_chat`."""
        return self._loaded.encode_chat(messages)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def scheduler(self) -> Scheduler:
        """What decides each step; read its counters, do not change it."""
        return self._scheduler

    # Requests

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        *,
        sessions: Many[str | None] | None = None,
    ) -> list[Completion]:
        """Answer prompts, as many at once as there is room for.

        Args:
            prompts: one prompt, or a list of them.
            params: for all, or one for each; None for the defaults.
            sessions: ids of conversations to keep between calls, one for each prompt.

        Returns:
            one completion for each prompt, in their order.

        Raises:
            RequestError: a prompt is empty, too long, or not to be understood.
        """
        listed = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(listed)
        names = [None] * len(listed) if sessions is None else sessions
        if not len(listed) == len(params) == len(names):
            raise RequestError(
                f"{len(listed)} prompts with {len(params)} sampling params and {len(names)} sessions"
            )
        sequences: list[Sequence] = []
        try:
            for prompt, param, name in zip(listed, params, names, strict=True):
                sequences.append(self.submit(prompt, param, session=name))
            while any(sequence.state is not SequenceState.FINISHED for sequence in sequences):
                self.step()
        finally:
            for sequence in sequences:
                self.abort(sequence)
        return [self.completion(sequence) for sequence in sequences]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, session: str | None = None
    ) -> Iterator[str]:
        """Answer one prompt piece by piece. Other sequences go on meanwhile.

        Raises:
            RequestError: as `generate`; or the model has no tokenizer.
        """
        self._check_open()
        self._check_speaks()
        sequence = self.submit(prompt, params, session=session)
        text = self._watch(sequence)
        try:
            while sequence.state is not SequenceState.FINISHED:
                self.step()
                if piece := text.take():
                    yield piece
            # It may have ended in a step that was made for another stream.
            if piece := text.take():
                yield piece
        finally:
            self.abort(sequence)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        session: str | None = None,
        salt: bytes = b"",
    ) -> Sequence:
        """Queue a prompt. `step` makes it go on; `completion` tells what became of it.

        Args:
            session: id of the conversation that it continues, or begins.
            salt: KV is shared only between requests of the same salt; one that is used once shares none.

        Raises:
            RequestError: the prompt is empty, too long, or not to be understood.
            ClosedError: the engine is closed.
        """
        self._check_open()
        params = params or SamplingParams()
        tokens = self._tokens(prompt)
        self._check(tokens, params)
        root = replace(self._identity, salt=salt).root
        sequence = self._sequence(tokens, params, session, root)
        if session is not None:
            sequence.partial_at = self._slept_at(session, tokens, root)
        if params.stop:
            self._watch(sequence)
        self._scheduler.add(sequence)
        return sequence

    def fork(self, sequence: Sequence, params: SamplingParams | None = None) -> Sequence:
        """A second answer that goes on from where a decoding one stands; its KV is shared, not copied.

        Args:
            params: of the fork; None for those of the sequence, with another seed unless one was asked for.

        Raises:
            RequestError: the sequence is not decoding, or `params` allow no more tokens, or too many.
            CapacityError: as many sequences run as `max_sequences` allows.
            ClosedError: the engine is closed.
        """
        self._check_open()
        params = params or sequence.params
        prompt = sequence.tokens[: sequence.num_prompt]
        self._check(prompt, params)
        generated = len(self._scheduler.tokens_of(sequence)) - sequence.num_prompt
        if sequence.state is SequenceState.DECODING and generated >= params.max_tokens:
            raise RequestError(
                f"sequence {sequence.id} has {generated} tokens already; "
                f"max_tokens allows {params.max_tokens}"
            )
        twin = self._sequence(prompt, params, None, sequence.root)
        self._scheduler.fork(sequence, twin)
        if params.stop:
            self._watch(twin)
        return twin

    def step(self) -> list[Sequence]:
        """One step: schedule, run, postprocess.

        Returns:
            the sequences that finished.

        Raises:
            ClosedError: the engine is closed.
            RequestError: another thread is in a step of it.
        """
        self._check_open()
        if not self._driven.acquire(blocking=False):
            raise RequestError("another thread is in a step of this engine; one thread drives it")
        try:
            return self._step()
        finally:
            self._driven.release()

    def _step(self) -> list[Sequence]:
        self.store.poll()
        step = self._scheduler.schedule()
        if step is None:
            self._scheduler.wait(0.01)
            return []
        sampled = self._runner.run(step, self._scheduler)
        finished = self._scheduler.postprocess(step, sampled)
        for sequence, text in list(self._texts.values()):
            if sequence.row is not None:
                text.feed(self._scheduler.tokens_of(sequence)[sequence.num_prompt :])
                if text.stopped:
                    self._scheduler.finish(sequence, FinishReason.STOP)
                    finished.append(sequence)
        for sequence in finished:
            self._finished(sequence)
        return finished

    def abort(self, sequence: Sequence) -> None:
        """End a sequence that nobody waits for any more; nothing where it has ended."""
        if sequence.state is not SequenceState.FINISHED:
            self._scheduler.finish(sequence, FinishReason.ABORTED)
            self._finished(sequence)

    def completion(self, sequence: Sequence) -> Completion:
        """What became of a finished sequence.

        Raises:
            RequestError: it has not finished.
        """
        if sequence.finished_at is None or sequence.finish_reason is None:
            raise RequestError(f"sequence {sequence.id} has not finished")
        started = sequence.scheduled_at or sequence.finished_at
        first = sequence.first_token_at or sequence.finished_at
        return Completion(
            text=self._text_of(sequence),
            token_ids=tuple(sequence.output.tolist()),
            finish_reason=sequence.finish_reason,
            prompt_tokens=sequence.num_prompt,
            cached=sequence.cached,
            computed=sequence.computed,
            queue_seconds=started - sequence.arrived_at,
            first_token_seconds=first - sequence.arrived_at,
            seconds=sequence.finished_at - sequence.arrived_at,
            preemptions=sequence.preemptions,
        )

    # Sessions

    def save_sessions(self) -> int:
        """Keep what is needed to go on with every conversation in another process; returns how many."""
        self._check_open()
        return sum(
            self.store.save_session(name, session.sleeping, session.tokens)
            for name, session in self._sessions.items()
        )

    def end_session(self, name: str) -> bool:
        """Forget a conversation; its blocks stay cached until room is wanted. False if it was not known."""
        self._check_open()
        return self._sessions.pop(name, None) is not None

    def session_tokens(self, name: str) -> npt.NDArray[np.int32] | None:
        """int32, a conversation's tokens so far: from this engine, or from the cold tier; or None."""
        self._check_open()
        session = self._sessions.get(name)
        if session is not None:
            return session.tokens
        record = self._find_record(name, self.store.root)
        return record.tokens if record is not None else None

    def reset_cache(self) -> None:
        """From now on nothing that was computed before is found: weights were updated in place.

        Raises:
            RequestError: sequences are not finished; their KV would be of both kinds.
        """
        self._check_open()
        if count := len(self._scheduler):
            raise RequestError(f"{count} sequences are not finished; reset the cache when they are")
        self._identity = replace(self._identity, epoch=self._identity.epoch + 1)
        self.store.root = self._identity.root
        self._sessions.clear()

    # The end

    def close(self, *, drain: float = 0.0) -> None:
        """Abort what is not finished and give the memory back. Idempotent.

        Args:
            drain: seconds to spend on writing sessions and blocks to the cold tier.
        """
        if self._closed:
            return
        with ExitStack() as rest:
            if self.host is not None:
                rest.callback(self.host.close, drain=drain)
            rest.callback(self.store.close)
            for sequence in self._scheduler.unfinished:
                self.abort(sequence)
            self.store.flush()
            if drain > 0:
                self.save_sessions()
            self._closed = True

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _sequence(
        self, tokens: npt.NDArray[np.int32], params: SamplingParams, session: str | None, root: bytes
    ) -> Sequence:
        """A new sequence with a prompt of `tokens`."""
        stops = tuple(params.stop_token_ids)
        if not params.ignore_eos:
            stops = (*stops, *sorted(self._loaded.eos_ids))
        self._next_id += 1
        return Sequence(
            id=self._next_id,
            tokens=tokens,
            num_prompt=len(tokens),
            params=params,
            root=root,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            stop_ids=stops,
            session=session,
        )

    def _tokens(self, prompt: Prompt) -> npt.NDArray[np.int32]:
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

    def _check(self, tokens: npt.NDArray[np.int32], params: SamplingParams) -> None:
        """Refuse what could never run."""
        if not len(tokens):
            raise RequestError("the prompt is empty")
        if len(tokens) >= self.max_tokens:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; with at least one to answer, max_tokens allows "
                f"{self.max_tokens - 1}"
            )
        last = self._loaded.config.vocab_size - 1
        if (highest := max(params.stop_token_ids, default=0)) > last:
            raise RequestError(f"stop_token_ids must be from 0 to {last}, got {highest}")
        if params.stop:
            self._check_speaks()
        longest = min(self.max_tokens, len(tokens) + params.max_tokens)
        wanted = self.layout.blocks_for(longest) + 1
        device = self.store.pool.capacity
        host = self.store.host.capacity if self.store.host is not None else 0
        if wanted > device + host:
            raise RequestError(
                f"{longest} tokens need {wanted} blocks; device_blocks ({device}) and host_bytes "
                f"({host} blocks) do not hold them"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")

    def _check_speaks(self) -> None:
        if self._loaded.tokenizer is None:
            raise RequestError(
                f"{self._loaded.name} has no tokenizer, so there is no text to stream or stop at"
            )

    def _find_record(self, name: str, root: bytes) -> SessionRecord | None:
        """A session's record in the cold tier; one that cannot be read is as good as none."""
        try:
            return self.store.find_session(name, root=root)
        except RecordError as error:
            _log.warning("session %r begins anew: %s", name, error)
            return None

    def _slept_at(self, name: str, tokens: npt.NDArray[np.int32], root: bytes) -> int | None:
        """The length at which a session slept, if `tokens` go on from there."""
        session = self._sessions.get(name)
        if session is not None:
            known, length = session.tokens, session.sleeping.length
        else:
            record = self._find_record(name, root)
            if record is None:
                return None
            known, length = record.tokens, record.length
        return length if np.array_equal(tokens[:length], known[:length]) else None

    def _watch(self, sequence: Sequence) -> TextStream:
        """Read a sequence's text as it comes."""
        _, text = self._texts.setdefault(
            sequence.id, (sequence, TextStream(self._loaded.tokenizer, sequence.params.stop))
        )
        return text

    def _finished(self, sequence: Sequence) -> None:
        if sequence.id in self._texts:
            _, text = self._texts.pop(sequence.id)
            text.feed(sequence.output, last=True)
            sequence.text = text.text
            # Its last token may have both ended a stop string and been the last that it may have.
            if text.stopped and sequence.finish_reason is FinishReason.LENGTH:
                sequence.finish_reason = FinishReason.STOP
        if sequence.session is not None and sequence.sleeping is not None:
            self._sessions[sequence.session] = _Session(sequence.tokens, sequence.sleeping)

    def _text_of(self, sequence: Sequence) -> str:
        if sequence.text is not None:
            return sequence.text
        if self._loaded.tokenizer is None:
            return ""
        text: str = self._loaded.tokenizer.decode(sequence.output.tolist(), skip_special_tokens=True)
        return text

    def _device_blocks(self, device: str, blocks: int | None, size: int | None) -> int:
        """Blocks of the device tier, from whichever setting says it."""
        if blocks is not None:
            if size is not None:
                raise ConfigError("device_bytes", "give this or device_blocks, not both")
            return blocks
        if size is None:
            size = _CPU_DEVICE_BYTES
            if device != "cpu":
                size = int(_GPU_SHARE * torch.cuda.mem_get_info(device)[0])
        if size < self.layout.block_bytes:
            raise ConfigError(
                "device_bytes", f"must hold a block of {self.layout.block_bytes} bytes, got {size}"
            )
        return size // self.layout.block_bytes


def _device_of(name: str, model: str | Path | LoadedModel) -> torch.device:
    """The device that is named; for ``auto``, where the model is if that is loaded."""
    where = model.model.device if isinstance(model, LoadedModel) else None
    if where is not None and name == "auto":
        return where
    device = find_device(name)
    if where is not None and where != device:
        raise ConfigError("device", f"the model was loaded on {where}, so it cannot run on {device}")
    return device


def _default_host_bytes() -> int:
    return max(_MIN_HOST_BYTES, int(_HOST_SHARE * memory_headroom().usable_bytes))


def _as_prompts(prompts: Prompt | Many[Prompt]) -> list[Prompt]:
    """One prompt, or many, as a list."""
    if isinstance(prompts, str | np.ndarray):
        return [prompts]
    if not isinstance(prompts, Many):
        raise RequestError(f"{_PROMPT_KINDS}, not {type(prompts).__name__}")
    if len(prompts) and isinstance(prompts[0], int | np.integer | Mapping):
        return [cast(Prompt, prompts)]
    return list(cast("Many[Prompt]", prompts))


def _as_message(message: object) -> Mapping[str, str]:
    if not isinstance(message, Mapping):
        raise RequestError("a chat is a list of messages, mappings with role and content")
    return message
