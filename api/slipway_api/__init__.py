"""The API of Slipway, shared by all parts: kinds, labels, headers, conditions and the bodies of the admin port."""

__version__ = "0.1.0"
