"""The HTTP server of a replica: the OpenAI API for clients, the admin port for the operator. Never imports torch."""
