"""Where a model comes from: addresses, downloads, checksums and the cache on this machine."""
