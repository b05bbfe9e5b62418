"""The OpenAI-compatible API over a token-generating service; knows Starlette, not Ray."""
