"""Bookkeeping of blocks and requests: which tokens are computed next. No torch, no clock."""
