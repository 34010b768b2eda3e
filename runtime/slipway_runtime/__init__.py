"""The inference engine: paged attention, continuous batching, an OpenAI server."""
