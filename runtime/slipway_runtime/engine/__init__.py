"""The inference engine: its step loop, in a thread or a process, and the client on the API side."""
