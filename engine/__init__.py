"""Blinkbed: CPU-free LLM inference over a ring in GPU memory."""

__version__ = "0.1.0"
