"""Settings of `slipway-agent serve`: the dialect, the engine's address, and the replica's identity from the pod."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from slipway_api import names
from slipway_api.dialect import ENV_DIALECT, Dialect, DialectError, parse
from slipway_api.listening import ALL_ADDRESSES

ENGINE_URL: Final = f"http://127.0.0.1:{names.SERVING_PORT}"
BOOT_LIST: Final = Path(names.ADAPTERS_DIRECTORY) / names.ADAPTERS_FILE
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


class SettingsError(ValueError):
    """A setting is missing or wrong; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The settings of one agent."""

    dialect: Dialect
    engine_url: str = ENGINE_URL
    host: str = ALL_ADDRESSES
    port: int = names.ADMIN_PORT
    served_name: str = ""  # empty: the first name that the engine lists
    revision: str = ""
    max_adapters: int | None = None  # as the engine was started; None: as the dialect says
    max_num_seqs: int = 0  # as the engine was started; 0: as many requests as the KV cache holds
    tls_directory: Path | None = None  # mounted certificate of the namespace; None: both ports speak plain text
    tls_name: str = ""  # the name in the certificate of the engine
    boot_list: Path = BOOT_LIST
    run_directory: Path = Path(names.RUN_DIRECTORY)
    drain_timeout_seconds: int = 120  # of a drain that a preStop hook asks for
    drained_file: Path | None = None  # the hook of the engine's container waits for it
    admin_token_digests: tuple[str, ...] = ()  # empty: the port listens on localhost only, and requires no token
    log_level: str = "INFO"

    @property
    def bind(self) -> str:
        """The address of the admin port: localhost where no admin token is configured."""
        return self.host if self.admin_token_digests else "127.0.0.1"


def run_directory(environment: Mapping[str, str]) -> Path:
    """The folder of the drain socket."""
    return Path(environment.get("SLIPWAY_RUN_DIR") or names.RUN_DIRECTORY)


def parse_arguments(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """The command line; exits with 2 where it is wrong. Without a verb it is `serve`: a pod needs no arguments."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["serve", *argv]

    parser = argparse.ArgumentParser(
        "slipway-agent", description="Answers Slipway's admin protocol beside a foreign engine.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    serve = verbs.add_parser(
        "serve",
        help="answer on the admin port",
        description="Each flag defaults to a variable such as SLIPWAY_ENGINE_URL.",
        allow_abbrev=False,
    )
    serve.add_argument("--dialect", type=Path, help=f"file with the engine's dialect; default: {ENV_DIALECT}")

    def flag(name: str, otherwise: str, text: str) -> None:
        variable = "SLIPWAY_" + name.upper().replace("-", "_")
        serve.add_argument(f"--{name}", default=environment.get(variable) or otherwise, help=text)

    flag("engine-url", ENGINE_URL, "where the engine listens")
    flag("host", ALL_ADDRESSES, "address of the admin port, which requires a token")
    flag("admin-port", str(names.ADMIN_PORT), "port of the protocol")
    flag("served-name", "", "model name of the replica; default: the engine's first")
    flag("revision", "", "revision of the replica")
    flag("max-adapters", "", "adapters that compute at the same time; default: the dialect's")
    flag("max-num-seqs", "0", "requests that compute at the same time; 0: as many as the KV cache holds")
    flag("drain-timeout", "120", "seconds that a drain may take which a preStop hook asks for")
    flag("drained-file", "", "file that exists when the engine may end: it is drained, or can finish no request")
    flag("tls-directory", "", "serve TLS with the certificate in this folder, and verify that of the engine")
    flag("tls-name", "", "the name that the certificate of the engine is for")
    flag("log-level", "INFO", f"one of {', '.join(_LEVELS)}")
    drain = verbs.add_parser("drain", help="drain the replica of this pod, and wait for the end", allow_abbrev=False)
    drain.add_argument("--refuse-after", type=float, default=0.0, help="seconds in which routers send more requests")
    return parser.parse_args(argv)


def serve_settings(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> AgentSettings:
    """The settings of a command line and an environment; raises SettingsError."""
    digests = tuple(part for part in environment.get(names.ENV_ADMIN_TOKEN_SHA256, "").split(",") if part)
    if not all(_SHA256.fullmatch(digest) for digest in digests):
        raise SettingsError(f"{names.ENV_ADMIN_TOKEN_SHA256} must be digests of 64 lower-case hex digits")
    if arguments.tls_directory and not arguments.tls_name:
        raise SettingsError("--tls-directory needs --tls-name, the name that the certificate of the engine is for")
    most = _whole("--max-adapters", arguments.max_adapters, 1024) if arguments.max_adapters else None
    if arguments.log_level not in _LEVELS:
        raise SettingsError(f"--log-level {arguments.log_level!r} must be one of {', '.join(_LEVELS)}")
    return AgentSettings(
        dialect=_dialect(arguments.dialect, environment),
        engine_url=_loopback(arguments.engine_url, "https" if arguments.tls_directory else "http"),
        host=arguments.host,
        port=_whole("--admin-port", arguments.admin_port, 65535),
        served_name=arguments.served_name,
        revision=arguments.revision,
        max_adapters=most,
        max_num_seqs=_whole("--max-num-seqs", arguments.max_num_seqs, 2**31),
        tls_directory=Path(arguments.tls_directory) if arguments.tls_directory else None,
        tls_name=arguments.tls_name,
        boot_list=Path(environment.get("SLIPWAY_BOOT_LIST") or BOOT_LIST),
        run_directory=run_directory(environment),
        drain_timeout_seconds=_whole("--drain-timeout", arguments.drain_timeout, 7 * 86400),
        drained_file=Path(arguments.drained_file) if arguments.drained_file else None,
        admin_token_digests=digests,
        log_level=arguments.log_level,
    )


def _whole(flag: str, text: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > most:
        raise SettingsError(f"{flag} {text!r} must be a number between 0 and {most}")
    return int(text)


def _dialect(file: Path | None, environment: Mapping[str, str]) -> Dialect:
    try:
        if file is not None:
            return parse(file.read_bytes())
        if environment.get(ENV_DIALECT):
            return parse(environment[ENV_DIALECT])
    except OSError as error:
        raise SettingsError(f"the dialect cannot be read: {file}: {error.strerror}") from None
    except DialectError as error:
        raise SettingsError(str(error)) from None
    raise SettingsError(f"no dialect: set {ENV_DIALECT}, or name a file with --dialect")


def _loopback(url: str, scheme: str) -> str:
    """The engine shares the agent's network: any other address is a mistake, or an attempt to reach further."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme == scheme and parts.port is not None and parts.path in ("", "/") and not parts.query
    except ValueError:
        is_right = False
    if not is_right or parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        raise SettingsError(f"--engine-url {url!r} must be {scheme}://127.0.0.1:PORT: the engine runs in the same pod")
    return url
