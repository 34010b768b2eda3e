"""The engine and the two ways to it: the step loop, and the client that the API side holds."""
