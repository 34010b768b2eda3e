"""Endpoints and credentials of model sources, from the environment that the operator fills from a Secret.

Fields with secrets stay out of `repr`, and nothing here is ever logged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit


@dataclass(frozen=True, kw_only=True)
class Access:
    """Endpoints and credentials; empty where the environment names none."""

    hub_endpoint: str = ""  # empty: the public hub
    hub_token: str = field(default="", repr=False)
    s3_endpoint: str = ""  # empty: AWS
    s3_region: str = ""
    s3_key: str = field(default="", repr=False)
    s3_secret: str = field(default="", repr=False)
    s3_session: str = field(default="", repr=False)
    bearer_token: str = field(default="", repr=False)  # for http(s), sent to `bearer_hosts` only
    bearer_hosts: frozenset[str] = frozenset()  # host, or host:port
    public_only: bool = False  # refuse http(s) addresses of private networks, on redirects too

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Access":
        """Read the environment variables that the tools of each source use."""
        return cls(
            hub_endpoint=environment.get("HF_ENDPOINT", ""),
            hub_token=environment.get("HF_TOKEN", ""),
            s3_endpoint=environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL", ""),
            s3_region=environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION", ""),
            s3_key=environment.get("AWS_ACCESS_KEY_ID", ""),
            s3_secret=environment.get("AWS_SECRET_ACCESS_KEY", ""),
            s3_session=environment.get("AWS_SESSION_TOKEN", ""),
            bearer_token=environment.get("HTTP_BEARER_TOKEN", ""),
            bearer_hosts=frozenset(host for host in environment.get("HTTP_BEARER_HOSTS", "").split(",") if host),
        )

    def with_hosts_of(self, *uris: str) -> "Access":
        """A copy that also sends the bearer token to the hosts of these http(s) addresses."""
        named = {urlsplit(uri).netloc for uri in uris if uri.startswith(("http://", "https://"))}
        return replace(self, bearer_hosts=self.bearer_hosts | named)

    def bearer_for(self, url: str) -> str:
        """The bearer token for the host of this URL; empty where the host is not in `bearer_hosts`."""
        return self.bearer_token if urlsplit(url).netloc in self.bearer_hosts else ""
