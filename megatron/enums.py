"""Megatron-LM's path of ``ModelType``."""

from megatron.classic_program import ModelType

__all__ = ["ModelType"]
