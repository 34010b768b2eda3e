"""One OpenAI endpoint in front of all services."""
