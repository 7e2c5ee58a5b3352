"""A compact LLM engine that runs on the store: schedule, run, postprocess."""

from __future__ import annotations

from ..tiers.extras import how_to_install

try:
    from .llm import LLM, Completion
    from .sampler import SamplingParams
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("kvpager."):
        raise
    raise ImportError(
        f"kvpager.engine needs {error.name}, which is not installed: {how_to_install('engine')}",
        name=error.name,
    ) from error

__all__ = ["LLM", "Completion", "SamplingParams"]
