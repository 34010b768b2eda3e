"""The `slipway-gateway` command. It handles SIGTERM before it imports what it needs."""

from slipway_api.early_sigterm import end_at_once_on_sigterm


def main() -> None:
    """The console script."""
    end_at_once_on_sigterm()
    from slipway_gateway import serve

    serve.run()


if __name__ == "__main__":
    main()
