"""HTTP server with OpenAI's completions API: one queue of requests, one generator."""
