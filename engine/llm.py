"""LLM: the engine as its users see it. Prompts in, text out; KV in three tiers underneath."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt

from ..kvstore.calls import ControlCalls, HostCalls
from ..kvstore.hashing import ChainIdentity
from ..kvstore.host import HostStore
from ..kvstore.policy import DEFAULT_POLICY, MOST_PRIORITY, Retention, expect_retention, policy_names
from ..kvstore.store import TieredStore
from ..tiers.cold import ColdTier, expect_cold_tier, is_open
from ..tiers.errors import CapacityError, ClosedError, ConfigError, RequestError
from ..tiers.settings import (
    expect_bytes,
    expect_choice,
    expect_flag,
    expect_integer,
    expect_path,
    expect_seconds,
    expect_text,
    expect_type,
)
from .compute_times import learn_compute
from .control import Control
from .loader import LoadedModel
from .requests import Prompt, PromptReader, as_params, as_prompts, names_of, params_of
from .runner import Runner
from .sampler import SamplingParams
from .scheduler import Scheduler
from .sequence import CachedTokens, FinishReason, Sequence, SequenceState
from .session_calls import SessionCalls
from .sessions import Sessions
from .sizing import costs_on, default_host_bytes, device_blocks_of, loaded_on, mover_on, told_by_bytes
from .text import Texts
from .waking import Swap

__all__ = ["LLM", "Completion"]

_log = logging.getLogger(__name__)

_TELL_COSTS_SECONDS: Final = 0.5


@dataclass(frozen=True)
class Completion:
    """What became of a prompt.

    Attributes:
        text: the answer; empty where the model has no tokenizer.
        token_ids: its tokens, a stop token included.
        finish_reason: why it ended: ``stop``, ``length``, ``aborted``, or ``capacity`` where no tier had room
            for more of it; what it has then is right, and not all.
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


class LLM:
    """A model, its scheduler and a tiered store. One thread drives it.

    Args:
        model: what `load_model` takes, or a model that is loaded already.
        device: ``cpu``, ``cuda:N``, or ``auto``: where a loaded model is, else a GPU where there is one.
        dtype: what to compute in and keep KV in, see `load_model`; ``auto`` of a loaded model is its own.
        block_size: tokens per block.
        device_blocks: blocks of the device tier; or give
        device_bytes: its size. None for both: on a GPU 85% of what is free once the weights are there, on a
            CPU a quarter of a GiB.
        host_bytes: size of the host tier, 0 for none. None: a quarter of the memory that is available.
        cold: the cold tier, or None. It is closed with the engine, but not by an engine that cannot be made.
        host: host memory of others, and the cold tier behind it: what `kvpager.connect` returns, or a
            `HostStore`. It takes the place of `host_bytes` and `cold`, and is not closed with the engine.
        policy: name of the eviction policy of the device tier, and of this engine's own host memory.
        max_sequences: sequences that run at a time.
        max_tokens: tokens of one sequence; None for what the model takes.
        step_tokens: tokens that one step computes at most; `max_sequences` where that is more.
        load_seconds: how long a request waits for what the cold tier has of it: its session's record, then
            its blocks.
        cuda_graphs: on a GPU, capture steps that only decode in CUDA graphs, one for each of a few sizes of
            batches as they first come; they take memory beside the device tier. Without effect where there
            is no kernel for the model's KV.
        gate: bring blocks up from the cold tier only where that ends sooner than computing them.
        calibration: the file in which `kvpager bench --calibrate` kept what links and models take here; None:
            the usual one, if it is there (`kvstore.calibration`). The engine refines it by what it measures.
        tenant: salt that keeps this engine's KV apart from other tenants'.
        swap: what becomes of sequences whose KV is not in the device tier, see `Swap`. The default decides by
            costs; the others do as other engines do, to compare with. `recompute` goes without host memory.

    Raises:
        ConfigError: a value is of a wrong type or out of range; the error names the setting.
        ModelError: the model cannot be read.
        MemoryUnavailableError: a tier does not fit this machine.
        ClosedError: the cold tier is closed.
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
        host: HostCalls | None = None,
        policy: str = DEFAULT_POLICY,
        max_sequences: int = 64,
        max_tokens: int | None = None,
        step_tokens: int = 512,
        load_seconds: float = 5.0,
        cuda_graphs: bool = True,
        gate: bool = True,
        calibration: str | Path | None = None,
        tenant: bytes = b"",
        swap: Swap | str = Swap.ATTEND,
    ) -> None:
        block_size = expect_integer("block_size", block_size, 1)
        device_blocks = _none_or_integer("device_blocks", device_blocks, 1)
        device_bytes = _none_or_integer("device_bytes", device_bytes, 1)
        host_bytes = _none_or_integer("host_bytes", host_bytes, 0)
        max_sequences = expect_integer("max_sequences", max_sequences, 1)
        max_tokens = _none_or_integer("max_tokens", max_tokens, 2)
        step_tokens = expect_integer("step_tokens", step_tokens, 1)
        load_seconds = expect_seconds("load_seconds", load_seconds)
        cuda_graphs = expect_flag("cuda_graphs", cuda_graphs)
        gate = expect_flag("gate", gate)
        if calibration is not None:
            calibration = expect_path("calibration", calibration)
        tenant = expect_bytes("tenant", tenant)
        expect_choice("policy", policy, policy_names())
        swap = Swap(expect_choice("swap", swap, [one.value for one in Swap]))
        if swap is Swap.RECOMPUTE:
            if host_bytes or host is not None:
                raise ConfigError("swap", "recompute goes without host memory; give none")
            host_bytes = 0
        if host is not None:
            for setting, value in (("host_bytes", host_bytes), ("cold", cold)):
                if value is not None:
                    raise ConfigError(setting, "give this, or the host memory of others, not both")
        if cold is not None:
            expect_cold_tier(cold)  # the host store does so, too, when the model is there
            if host_bytes == 0:
                raise ConfigError("host_bytes", "a cold tier needs host memory above it")
        self._loaded, device = loaded_on(model, device, dtype)
        positions = self._loaded.max_positions
        self.max_tokens = positions if max_tokens is None else max_tokens
        if self.max_tokens > positions:
            raise ConfigError(
                "max_tokens", f"must be between 2 and the model's {positions}, got {max_tokens!r}"
            )
        self.layout = self._loaded.model.kv_layout(block_size)
        self._identity = ChainIdentity(self._loaded.identity, tenant=tenant)
        blocks = device_blocks_of(self.layout, device, device_blocks, device_bytes)
        host_bytes = default_host_bytes() if host_bytes is None else host_bytes
        on_gpu = device if device != "cpu" else None
        step_tokens = max(step_tokens, max_sequences)
        costs = costs_on(
            device,
            self.layout,
            self._loaded.identity,
            calibration=calibration,
            cold=None if cold is None else cold.name,
            step_tokens=step_tokens,
        )
        with ExitStack() as undo:
            self.host = (
                HostStore(host_bytes, cold=cold, policy=policy, device=on_gpu)
                if host is None and host_bytes
                else None
            )
            if self.host is not None:
                # Whoever opened the cold tier has no engine that would close it, and may try again.
                undo.callback(self.host.close, keep_cold=True)
            mover = mover_on(device)
            undo.callback(mover.close)
            with told_by_bytes(device_bytes):
                self.store = TieredStore(
                    self.layout,
                    blocks,
                    root=self._identity.root,
                    host=host if host is not None else self.host,
                    device=device,
                    max_sequences=max_sequences,
                    policy=policy,
                    mover=mover,
                    costs=costs,
                )
            undo.callback(self.store.close)
            self._scheduler = Scheduler(
                self.store,
                max_sequences=max_sequences,
                max_tokens=self.max_tokens,
                step_tokens=step_tokens,
                load_seconds=load_seconds,
                gate=gate,
                swap=swap,
            )
            self._runner = Runner(self._loaded.model, self.store, self.max_tokens, cuda_graphs=cuda_graphs)
            self._prompts = PromptReader(self._loaded)
            self._texts = Texts(self._loaded.tokenizer)
            self._sessions = Sessions(
                self.store, cold, load_seconds, has_cold=cold is not None or host is not None
            )
            self._session_calls = SessionCalls(
                self.store, self._scheduler, self._sessions, self._between_steps
            )
            operators: object = host
            self._control: Control | None = None
            if isinstance(operators, ControlCalls):
                self._control = Control(operators, self.store, self._scheduler, self._sessions)
            undo.pop_all()
        self._cold = cold
        self._next_id = 0
        self._tell_costs_at = 0.0
        self._driven = threading.Lock()
        self._closed = False
        self._ended = False  # closed to the end: what was interrupted may be closed again

    @property
    def tokenizer(self) -> object:
        """transformers' tokenizer of the model, or None."""
        return self._loaded.tokenizer

    def encode_chat(self, messages: Many[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins, see `LoadedModel.encode_chat`."""
        return self._loaded.encode_chat(messages)

    @property
    def vocabulary(self) -> int:
        """Tokens have ids below this."""
        return self._loaded.config.vocab_size

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def kernels(self) -> tuple[str, ...]:
        """Which attention runs on kernels, of ``decode`` and ``prefill``; the rest is plain torch."""
        return self._loaded.model.kernels_for(self.layout)

    @property
    def captured(self) -> list[int]:
        """The sizes of batches whose decode step is a CUDA graph by now, ascending."""
        return self._runner.captured

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
        priority: int = 0,
        retention: Retention | None = None,
    ) -> list[Completion]:
        """Answer prompts, as many at once as there is room for.

        Args:
            prompts: one prompt, or a list of them.
            params: for all, or one for each; None for the defaults.
            sessions: ids of conversations to keep between calls, one for each prompt.
            priority, retention: of all of them, see `submit`.

        Returns:
            one completion for each prompt, in their order. One that no tier had room for says so in its
            `finish_reason`; the others are whole.

        Raises:
            RequestError: a prompt is empty, too long, or not to be understood; or a session is named twice.
            ConfigError: `params` or `sessions` are of a wrong type.
            ClosedError: the engine is closed.
        """
        self._check_open()
        given = as_prompts(prompts)
        of_each = params_of(params, len(given))
        names = names_of(sessions, len(given))
        sequences: list[Sequence] = []
        try:
            for prompt, one, name in zip(given, of_each, names, strict=True):
                sequences.append(
                    self.submit(prompt, one, session=name, priority=priority, retention=retention)
                )
            while any(sequence.state is not SequenceState.FINISHED for sequence in sequences):
                self.step()
        finally:
            for sequence in sequences:
                self.abort(sequence)
        return [self.completion(sequence) for sequence in sequences]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        session: str | None = None,
        priority: int = 0,
        retention: Retention | None = None,
    ) -> Iterator[str]:
        """Answer one prompt piece by piece. Other sequences go on meanwhile. Arguments as of `submit`.

        Raises:
            RequestError: as `generate`; or the model has no tokenizer.
            CapacityError: no tier had room for more of it; all text before has been given.
            ClosedError: the engine is closed, or was before the answer ended; all text before has been given.
        """
        self._check_open()
        self._check_speaks()
        sequence = self.submit(prompt, params, session=session, priority=priority, retention=retention)
        text = self._texts.watch(sequence)
        try:
            while sequence.state is not SequenceState.FINISHED:
                self.step()
                if piece := text.take():
                    yield piece
            # It may have ended in a step that was made for another stream.
            if piece := text.take():
                yield piece
            if sequence.finish_reason is FinishReason.CAPACITY:
                raise CapacityError(
                    f"device_blocks ({self.store.pool.capacity}) and host_bytes have no room for more than "
                    f"{len(sequence.tokens)} tokens"
                )
            if sequence.finish_reason is FinishReason.ABORTED:
                self._check_open()
        finally:
            self.abort(sequence)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        session: str | None = None,
        salt: bytes = b"",
        priority: int = 0,
        retention: Retention | None = None,
    ) -> Sequence:
        """Queue a prompt. `step` makes it go on; `completion` tells what became of it.

        Args:
            session: id of the conversation that it continues, or begins.
            salt: KV is shared only between requests of the same salt; one that is used once shares none.
            priority: from -100 to 100. Who has a higher one is put to sleep last, and goes before those that
                came up to `PRIORITY_SECONDS` earlier for each step between them.
            retention: advice on how long its blocks are worth keeping, from when it gives up its row, and on
                whether it is put to sleep, as of `SessionCalls.retain`.

        Raises:
            RequestError: the prompt is empty, too long, or not to be understood.
            ConfigError: `params`, `session`, `salt`, `priority` or `retention` is of a wrong type or out of
                range.
            ClosedError: the engine is closed.
        """
        self._check_open()
        params = SamplingParams() if params is None else as_params(params)
        if session is not None:
            expect_text("session", session)
        priority = expect_integer("priority", priority, -MOST_PRIORITY, MOST_PRIORITY)
        retention = expect_retention(retention)
        root = replace(self._identity, salt=expect_bytes("salt", salt)).root
        tokens = self._prompts.tokens(prompt)
        self._check(tokens, params)
        sequence = self._sequence(tokens, params, session, root)
        sequence.priority = priority
        if retention is not None:
            self._scheduler.advise(sequence, retention)
        self._sessions.check_cold()
        if session is not None:
            sequence.partial_at, sequence.lookup = self._sessions.look_up(session, tokens, root)
        if params.stop:
            self._texts.watch(sequence)
        self._scheduler.add(sequence)
        return sequence

    def fork(self, sequence: Sequence, params: SamplingParams | None = None) -> Sequence:
        """A second answer that goes on from where a decoding one stands; its KV is shared, not copied.

        Args:
            params: of the fork; None for those of the sequence, with another seed unless one was asked for.

        Raises:
            RequestError: the sequence is not decoding, or `params` allow no more tokens, or too many.
            ConfigError: `params` are of a wrong type.
            CapacityError: as many sequences run as `max_sequences` allows.
            ClosedError: the engine is closed.
        """
        self._check_open()
        _as_sequence(sequence)
        params = sequence.params if params is None else as_params(params)
        prompt = sequence.tokens[: sequence.num_prompt]
        self._check(prompt, params)
        generated = len(self._scheduler.tokens_of(sequence)) - sequence.num_prompt
        if sequence.state is SequenceState.DECODING and generated >= params.max_tokens:
            raise RequestError(
                f"sequence {sequence.id} has {generated} tokens already; "
                f"max_tokens allows {params.max_tokens}"
            )
        twin = self._sequence(prompt, params, None, sequence.root)
        twin.priority, twin.retention, twin.ends_at = sequence.priority, sequence.retention, sequence.ends_at
        self._scheduler.fork(sequence, twin)
        if params.stop:
            self._texts.watch(twin)
        return twin

    def step(self) -> list[Sequence]:
        """One step: schedule, run, postprocess.

        Returns:
            the sequences that finished, for whatever reason.

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
        if (now := time.monotonic()) >= self._tell_costs_at:
            self._tell_costs_at = now + _TELL_COSTS_SECONDS
            self.store.tell_costs()
        if self._control is not None:
            self._control.between_steps()
        step = self._scheduler.schedule()
        finished = self._scheduler.take_given_up()
        if step is not None:
            began = time.perf_counter()
            sampled = self._runner.run(step, self._scheduler)
            learn_compute(self.store, step, time.perf_counter() - began)
            finished += self._scheduler.postprocess(step, sampled)
            for sequence in self._texts.read(self._scheduler.tokens_of):
                self._scheduler.finish(sequence, FinishReason.STOP)
                finished.append(sequence)
        elif not finished:
            self._scheduler.wait(0.01)
        for sequence in finished:
            self._finished(sequence)
        return finished

    def abort(self, sequence: Sequence) -> None:
        """End a sequence that nobody waits for any more; nothing where it has ended."""
        with self._driving("a sequence is aborted"):
            self._abort(sequence)

    def _abort(self, sequence: Sequence) -> None:
        if _as_sequence(sequence).state is not SequenceState.FINISHED:
            self._scheduler.finish(sequence, FinishReason.ABORTED)
            self._finished(sequence)

    @contextmanager
    def _driving(self, what: str) -> Iterator[None]:
        """Nobody else is in a step, nor will be before this ends.

        Raises:
            RequestError: somebody is: another thread, or the one whose signal handler this is.
        """
        if not self._driven.acquire(blocking=False):
            raise RequestError(f"the engine is in a step; {what} between steps, by the thread that drives it")
        try:
            yield
        finally:
            self._driven.release()

    @contextmanager
    def _between_steps(self, what: str) -> Iterator[None]:
        """`_driving` for an engine that is open."""
        self._check_open()
        with self._driving(what):
            yield

    def completion(self, sequence: Sequence) -> Completion:
        """What became of a finished sequence.

        Raises:
            RequestError: it has not finished.
        """
        _as_sequence(sequence)
        if sequence.finished_at is None or sequence.finish_reason is None:
            raise RequestError(f"sequence {sequence.id} has not finished")
        started = sequence.scheduled_at or sequence.finished_at
        first = sequence.first_token_at or sequence.finished_at
        return Completion(
            text=self._texts.text_of(sequence),
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

    @property
    def sessions(self) -> SessionCalls:
        """The conversations of this engine: where they are, to be put to sleep, woken, brought up ahead."""
        return self._session_calls

    def save_sessions(self) -> int:
        """Keep what is needed to go on with every conversation in another process; returns how many.

        Raises:
            ClosedError: the engine is closed, or its cold tier was.
        """
        self._check_open()
        return self._sessions.save()

    def end_session(self, name: str) -> bool:
        """Forget a conversation; its blocks stay cached until room is wanted. False if it was not known."""
        self._check_open()
        return self._sessions.end(expect_text("name", name))

    def session_tokens(self, name: str) -> npt.NDArray[np.int32] | None:
        """int32, a conversation's tokens so far: from this engine, or from the cold tier; or None."""
        self._check_open()
        return self._sessions.tokens(expect_text("name", name))

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

        Raises:
            ConfigError: `drain` is not a number of seconds; the engine stays open.
        """
        drain = expect_seconds("drain", drain)
        if self._ended:
            return
        with self._driving("it is closed"):
            self._close(drain)

    def _close(self, drain: float) -> None:
        if drain > 0 and self._cold is not None and not is_open(self._cold):
            _log.warning("nothing is drained: the cold tier was closed before the engine")
            drain = 0.0
        with ExitStack() as rest:
            if self.host is not None:
                rest.callback(self.host.close, drain=drain)
            rest.callback(self.store.close)
            rest.callback(self._runner.close)
            rest.callback(self._sessions.close)
            if self._control is not None:
                rest.callback(self._control.close)
            below = self.store.host
            if below is not None and below.closed:
                _log.warning("nothing is kept: the host memory was closed before the engine")
            elif not self.store.closed:  # a close that was interrupted may have come that far
                for sequence in self._scheduler.unfinished:
                    self._abort(sequence)
                self.store.flush()
                if drain > 0:
                    self.save_sessions()
            self._closed = True
        self._ended = True

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

    def _finished(self, sequence: Sequence) -> None:
        self._texts.end(sequence)
        if sequence.session is not None and sequence.sleeping is not None:
            self._sessions.keep(sequence.session, sequence.tokens, sequence.sleeping)
            self._session_calls.ended(sequence)


def _none_or_integer(setting: str, value: object, least: int) -> int | None:
    return None if value is None else expect_integer(setting, value, least)


def _as_sequence(sequence: object) -> Sequence:
    return expect_type("sequence", sequence, Sequence, "a sequence, from submit or fork")
