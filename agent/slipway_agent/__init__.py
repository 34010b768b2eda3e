"""The agent: a small process beside a foreign engine that answers the admin protocol of a replica for it.

Tokens never pass through it: clients talk to the engine's port. It knows its engine from one document, the dialect.
"""
