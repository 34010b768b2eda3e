"""Real certificates of a test's own authority, in files as the kubelet mounts them."""

from datetime import UTC, datetime
from pathlib import Path

from slipway_api import internal_tls
from slipway_operator.authority import Pair, issue, new_authority


class TlsFiles:
    """An authority, and the mounted files of one server."""

    def __init__(self, folder: Path, *, made_at: datetime | None = None) -> None:
        self.folder = folder
        self.authority: Pair = new_authority(made_at or datetime.now(UTC))
        folder.mkdir(exist_ok=True)

    @property
    def bundle(self) -> str:
        return self.authority.certificate.decode()

    def issue(self, *names: str, made_at: datetime | None = None) -> Pair:
        """Mount a new certificate for these names."""
        pair = issue(self.authority, names, made_at or datetime.now(UTC))
        self.mount(pair)
        return pair

    def mount(self, pair: Pair) -> None:
        for name, content in (
            (internal_tls.CERTIFICATE_FILE, pair.certificate),
            (internal_tls.KEY_FILE, pair.key),
            (internal_tls.CA_FILE, self.authority.certificate),
        ):
            new = self.folder / f"..{name}"
            new.write_bytes(content)
            new.replace(self.folder / name)
