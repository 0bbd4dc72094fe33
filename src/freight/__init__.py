"""Freight trains large language models on long and packed sequences."""

__version__ = "0.1.0"
