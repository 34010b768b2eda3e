"""The stock clients of OpenAI and Anthropic talk to one gateway; embeddings have a service of their own."""

import anthropic
import numpy as np
import openai
import pytest

from e2e.manifests import as_yaml, static
from e2e.slipway import GATEWAY, Slipway

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.capability("API-16", "API-18")
def test_responses_messages_and_embeddings_through_one_endpoint(clean: Slipway) -> None:
    clean.apply(as_yaml(static("talk", 1)))
    clean.apply(
        as_yaml(static("vectors", 1, runtime={"task": "embed", "pooling": "mean", "kvCache": {"bytes": "16Mi"}}))
    )
    for name in ("talk", "vectors"):
        clean.wait_ready(name, replicas=1)
    url = f"http://127.0.0.1:{clean.access.port(GATEWAY)}"

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        response = client.responses.create(model="talk", input="What is a pod?", temperature=0, max_output_tokens=40)
        with client.responses.stream(
            model="talk", input="What is a pod?", temperature=0, max_output_tokens=40
        ) as stream:
            streamed = stream.get_final_response()
        embedded = client.embeddings.create(model="vectors", input=["A pod.", "A pod.", "A node."])
        with pytest.raises(openai.NotFoundError, match="computes embeddings"):
            client.responses.create(model="vectors", input="What is a pod?")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        ask = {"model": "talk", "messages": [{"role": "user", "content": "What is a pod?"}]}
        with client.messages.stream(**ask, max_tokens=40, extra_body={"temperature": 0}) as stream:
            said = "".join(stream.text_stream)
        counted = client.messages.count_tokens(**ask)

    assert response.output_text
    assert streamed.output_text == response.output_text == said
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens
    first, second, other = (np.array(one.embedding) for one in embedded.data)
    assert first @ second == pytest.approx(1.0, abs=1e-3)
    assert first @ other < 0.9999
