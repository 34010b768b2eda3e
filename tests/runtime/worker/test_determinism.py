"""With `deterministic`, nothing beside a sequence changes its scores by a single bit. Without, only by rounding."""

import random
from dataclasses import dataclass

import pytest
import torch

from slipway_runtime.kernels import native
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.machine import Machine, Stretch

SEQUENCES, OUTPUT = 32, 32  # each output is cut in every place: 32 × 32 pairs
ROUNDING = 2e-5  # of the largest score: what the order of float32 sums changes, with room


@dataclass(frozen=True)
class Story:
    """A prompt, what the model made of it token by token, and the scores that each of these tokens was sampled from."""

    prompt: list[int]
    output: list[int]
    scores: torch.Tensor  # (OUTPUT, V)

    def known(self, at: int) -> list[int]:
        """The prompt and `at` tokens of the output."""
        return self.prompt + self.output[:at]


def tell(machine: Machine, prompts: list[list[int]]) -> list[Story]:
    """Generate greedily, all prompts in one batch."""
    texts, scores = [list(prompt) for prompt in prompts], []
    for step in range(OUTPUT):
        work = [Stretch(row, text, len(text) - 1 if step else 0, len(text)) for row, text in enumerate(texts)]
        sampled = machine.logits(*work)
        last = torch.stack([sampled[row][-1] for row in range(len(texts))])
        scores.append(last)
        for text, token in zip(texts, last.argmax(-1).tolist(), strict=True):
            text.append(token)
    of_rows = torch.stack(scores, dim=1)
    return [
        Story(prompt, text[len(prompt) :], of_rows[row])
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]


def some_prompts(count: int, vocabulary: int, longest: int = 24) -> list[list[int]]:
    sample = random.Random(0)
    return [[sample.randrange(3, vocabulary) for _ in range(sample.randrange(1, longest))] for _ in range(count)]


def split_and_resume(machine: Machine, stories: list[Story]) -> list[tuple[Story, int, torch.Tensor]]:
    """Every story, cut at every token: another batch reads what is known until then, in one chunk or in two, and the
    scores of the next token are returned with the story and the cut. (V,).
    """
    sample = random.Random(1)
    pairs = [(story, at) for story in stories for at in range(OUTPUT)]
    sample.shuffle(pairs)
    resumed = []
    for first in range(0, len(pairs), SEQUENCES):
        batch = pairs[first : first + SEQUENCES]
        texts = [story.known(at) for story, at in batch]
        cuts = [sample.choice((0, len(text) - 1, sample.randrange(len(text)))) for text in texts]
        early = [Stretch(row, text, 0, cut) for row, (text, cut) in enumerate(zip(texts, cuts, strict=True)) if cut]
        if early:
            machine.logits(*early)
        sampled = machine.logits(
            *(Stretch(row, text, cut, len(text)) for row, (text, cut) in enumerate(zip(texts, cuts, strict=True)))
        )
        resumed += [(story, at, sampled[row][-1]) for row, (story, at) in enumerate(batch)]
    return resumed


@pytest.fixture(params=["compiled", "torch"])
def arithmetic(request: pytest.FixtureRequest) -> None:
    """Either way in which a CPU computes."""
    if request.param == "torch":
        request.getfixturevalue("torch_alone")
    elif native.library() is None:
        pytest.skip("there are no compiled kernels here")


@pytest.mark.capability("API-19")
@pytest.mark.usefixtures("arithmetic")
def test_a_thousand_splits_resume_bit_for_bit():
    machine = Machine(deterministic=True)
    stories = tell(machine, some_prompts(SEQUENCES, 3072))
    resumed = split_and_resume(machine, stories)
    assert len(resumed) >= 1000
    different = sum(not torch.equal(scores, story.scores[at]) for story, at, scores in resumed)
    assert different == 0


@pytest.mark.capability("API-19")
@pytest.mark.usefixtures("torch_alone")
def test_without_determinism_only_tokens_within_rounding_may_differ():
    machine = Machine()
    stories = tell(machine, some_prompts(SEQUENCES // 2, 3072))
    resumed = split_and_resume(machine, stories)
    for story, at, scores in resumed:
        before = story.scores[at]
        rounding = ROUNDING * float(before.abs().max())
        assert float((scores - before).abs().max()) <= rounding
        if int(scores.argmax()) != story.output[at]:
            best, second = before.topk(2).values.tolist()
            assert best - second <= 2 * rounding, "these two were not close: this is no rounding"
    assert not all(torch.equal(scores, story.scores[at]) for story, at, scores in resumed), (
        "else the mode is for free, as with the compiled kernels"
    )


@pytest.mark.capability("API-19")
@pytest.mark.parametrize(
    "settings",
    [{"quantization": "int8"}, {"quantization": "fp8"}, {"kv_dtype": "fp8"}, {"dtype": torch.bfloat16}],
    ids=str,
)
@pytest.mark.parametrize(
    ("family", "shape"),
    [("qwen2", {}), ("qwen3", {"head_dim": 20}), ("mistral", {"sliding_window": 9, "num_key_value_heads": 1})],
)
@pytest.mark.usefixtures("arithmetic")
def test_a_sequence_scores_the_same_alone_in_a_batch_and_in_chunks(family, shape, settings, tmp_path):
    a_checkpoint(tmp_path, family, **shape)
    machine = Machine(tmp_path, deterministic=True, block=4, rows=4, **settings)
    texts = [prompt + [5] * 40 for prompt in some_prompts(4, 97)]
    alone = [machine.logits(Stretch(0, text, 0, len(text)))[0] for text in texts]
    batch = machine.logits(*(Stretch(row, text, 0, len(text)) for row, text in enumerate(texts)))
    assert all(torch.equal(batch[row], scores) for row, scores in enumerate(alone))
    # as decode steps of one row beside chunks of the others
    for at in range(30, 40):
        work = [Stretch(0, texts[0], at, at + 1), *(Stretch(r, texts[r], at - 5 - r, at) for r in (1, 2, 3))]
        for row, scores in machine.logits(*work).items():
            start = work[row].start
            assert torch.equal(scores, alone[row][start : start + len(scores)])
