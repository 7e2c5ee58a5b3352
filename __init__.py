"""kvpager: a tiered KV-cache offload service."""

__version__ = "0.1.0"
