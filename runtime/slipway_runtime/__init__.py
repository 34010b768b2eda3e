"""The inference server: paged attention, continuous batching, an OpenAI-compatible API."""
