"""Model storage: addresses, sources, downloads, checksums, and the cache on this machine."""
