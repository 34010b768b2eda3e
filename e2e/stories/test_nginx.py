"""A user puts nginx in front of the gateway, and streams arrive token by token."""

from contextlib import ExitStack

import openai
import pytest

from bench.nginx import an_nginx
from bench.packages import NoProgramError
from e2e.manifests import as_yaml, static
from e2e.slipway import GATEWAY, Slipway
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

TOKENS = 64
FEW_EVENTS = 1024  # bytes; one event has about 260


@pytest.mark.capability("PF-15")
def test_tokens_arrive_one_by_one_through_nginx(clean: Slipway) -> None:
    clean.apply(as_yaml(static("proxied", 1)))
    service = clean.wait_ready("proxied", replicas=1)
    gateway = f"http://127.0.0.1:{clean.access.port(GATEWAY)}"
    with ExitStack() as stack:
        try:
            server = stack.enter_context(an_nginx(gateway))
        except NoProgramError as missing:
            pytest.skip(str(missing))
        revision, pieces = streamed(server.url)

    assert revision == service["status"]["currentRevision"]
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    # A proxy that holds a stream back sends whole buffers of 4 KiB. Events also merge where the client reads late, so
    # the number of pieces says nothing on a busy machine.
    assert min(map(len, pieces[:-1])) < FEW_EVENTS, list(map(len, pieces))


def streamed(url: str) -> tuple[str, list[bytes]]:
    """The revision that answers a streamed chat, and the pieces in which its answer arrives."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    raw = client.chat.completions.with_streaming_response.create(
        model="proxied",
        messages=[{"role": "user", "content": "Tell me a story."}],
        max_tokens=TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with raw as response:
        return response.headers[names.HEADER_REVISION], list(response.iter_bytes())
