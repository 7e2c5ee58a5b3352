"""A compact LLM engine that runs on the store: schedule, run, postprocess."""

from __future__ import annotations

from .llm import LLM, Completion
from .sampler import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams"]
