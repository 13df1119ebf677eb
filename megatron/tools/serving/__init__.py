"""Serves a model over HTTP with OpenAI's completions API: one queue of requests, one generator."""
