"""The kubectl plugin: `kubectl slipway …` shows, explains and steers services, with kubectl's own credentials."""
