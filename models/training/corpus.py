"""Write the training text: chats and plain texts, one JSON object per line, the same for the same seed.

Everything comes from the grammars and word lists beside this file, so the text is the project's own.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import answers
import facts
from facts import Turn
from grammar import expand, spin
from stories import Story, brief, chapters, tell

SYSTEM = [
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "You are Tiny, a small language model.",
    "You are a kind and patient helper.",
    "You help people who run models on Kubernetes.",
    "Answer clearly and in plain words.",
    "You are a helpful, honest assistant. Use simple words.",
    "You are the assistant of the Slipway demo.",
]
SHORT = ["Answer in one sentence.", "Keep your answers short.", "Be brief.", "You are a helpful assistant. Be brief."]


@dataclass(frozen=True)
class Document:
    """A chat (`system`, `turns`) or, with no turns, a plain text."""

    kind: str
    turns: list[Turn]
    system: str = ""
    text: str = ""

    def record(self) -> dict[str, object]:
        """The document as a JSON object; chats use the usual role and content."""
        if not self.turns:
            return {"kind": self.kind, "text": self.text}
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for user, assistant in self.turns:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return {"kind": self.kind, "messages": messages}


def request(rng: random.Random, story: Story, size: str) -> str:
    """Ask for this very story: the request names only what the story really has."""
    n = story.names
    start = "{Tell me|Tell me|Write|Please tell me|Can you tell me|I would like|Make up|Please write|Give me}"
    asks = [
        f"about a {n['kind']}",
        f"about a {n['kind']}",
        f"about a {n['kind']} called {n['hero']}",
        f"about a {n['kind']} named {n['hero']}",
        f"about {n['hero']} the {n['kind']}",
        f"about {n['hero']} and {n['friend']}",
        f"about a {n['kind']} and a {n['fkind']}",
        f"about a {n['trait']} {n['kind']}",
        "",
        *[expand(rng, a, n) for a in story.plot.heads["ask"]],
    ]
    if n["place"] in story.text:
        asks += [f"about a {n['kind']} at the {n['place']}", f"that happens at the {n['place']}"]
    if n["obj"] in story.text:
        asks += [f"about a {n['kind']} and a {n['obj']}", f"with a {n['toy']} in it"]
    ask = spin(rng, f"{start} a {size}story {rng.choice(asks)}").strip()
    return ask + ("?" if ask.startswith("Can") else ".")


def story_chat(rng: random.Random) -> Document:
    """A wish for a story, the story, and sometimes questions about it."""
    roll = rng.random()
    if roll < 0.1:
        story = brief(rng)
        return Document("story", [(request(rng, story, "{very short |three-sentence |tiny }"), story.text)])
    if roll < 0.2:
        story, text = chapters(rng, rng.choice([2, 2, 3, 3, 4, 5]))
        return Document("long", [(request(rng, story, "long "), text)])
    story = tell(rng)
    if roll < 0.25:
        cut = story.paragraphs[0].split(". ")[0] + "."
        asked = spin(rng, "{Continue|Go on with|Finish} this story: ") + cut
        return Document("story", [(asked, story.text.removeprefix(cut).strip() or story.text)])
    titled = rng.random() < 0.2
    text = f"{story.title}\n\n{story.text}" if titled else story.text
    turns = [(request(rng, story, rng.choice(["", "", "short ", "little ", "nice ", "{bedtime |good |new }"])), text)]
    if rng.random() < 0.45:
        turns += follow(rng, story, rng.randint(1, 3))
    return Document("story", turns)


def follow(rng: random.Random, story: Story, count: int) -> list[Turn]:
    """Questions after a story."""
    asked = rng.sample(story.questions, min(count, len(story.questions)))
    extra = [
        (
            spin(rng, "{What can we learn from it?|What is the moral of the story?|What does the story teach us?}"),
            story.moral,
        ),
        (spin(rng, "{Sum it up in one sentence.|What happens in the story?|Can you make it shorter?}"), story.summary),
        (spin(rng, "{Give the story a title.|What is a good title?}"), story.title),
    ]
    return asked + ([rng.choice(extra)] if rng.random() < 0.5 else [])


def story_question(rng: random.Random) -> Document:
    """A short text and a question about it, all in one message."""
    story = tell(rng) if rng.random() < 0.6 else brief(rng)
    question, answer = rng.choice(story.questions)
    text = story.text.replace("\n\n", " ")
    return Document("question", [(spin(rng, "{Read this:\n|Here is a story:\n|}") + f"{text}\n{question}", answer)])


def story_text(rng: random.Random) -> Document:
    """A story without a chat around it, for plain completion."""
    story = tell(rng)
    return Document("text", [], text=(f"{story.title}\n\n" if rng.random() < 0.4 else "") + story.text)


def field_text(rng: random.Random) -> Document:
    """A page of explanations, for plain completion."""
    names = rng.sample(list(answers.CONCEPTS), rng.randint(1, 4))
    parts = [answers.say(rng, name, rng.choice(["d", "dw", "dwx", "dwxu"])) for name in names]
    return Document("text", [], text="\n\n".join(parts))


def chat(kind: str, *sources: Callable[[random.Random], list[Turn]]) -> Callable[[random.Random], Document]:
    """A single exchange from one of the sources."""
    return lambda rng: Document(kind, rng.choice(sources)(rng))


def mixed(rng: random.Random) -> Document:
    """A longer talk that jumps between subjects, as people do in a demo."""
    sources = [
        answers.talk,
        facts.fact,
        answers.concept,
        facts.numbers,
        answers.talk,
        answers.poem,
        answers.process,
    ]
    turns: list[Turn] = []
    for _ in range(rng.randint(2, 6)):
        turns += rng.choice(sources)(rng)
    if rng.random() < 0.3:
        story = tell(rng)
        turns += [(request(rng, story, ""), story.text), *follow(rng, story, 1)]
    return Document("mixed", turns)


MIX: list[tuple[float, Callable[[random.Random], Document]]] = [
    (0.24, story_chat),
    (0.09, story_question),
    (0.06, story_text),
    (0.02, field_text),
    (0.17, chat("fact", facts.fact)),
    (0.08, chat("number", facts.numbers)),
    (0.14, chat("field", answers.concept, answers.concept, answers.concept, answers.difference, answers.process)),
    (0.03, chat("decide", answers.decide)),
    (0.07, chat("talk", answers.talk)),
    (0.02, chat("unknown", answers.unknown)),
    (0.02, chat("poem", answers.poem)),
    (0.06, mixed),
]


LONG = [story_chat, story_question, story_text, field_text, mixed]


def careless(rng: random.Random, text: str) -> str:
    """Write as people type: small letters, no full stop."""
    if "\n" in text or rng.random() > 0.15:
        return text
    text = text.rstrip(".?!") if rng.random() < 0.7 else text
    return text[:1].lower() + text[1:] if rng.random() < 0.7 else text


def documents(seed: int, count: int, short: float = 1.0) -> Iterator[Document]:
    """Yield `count` documents; long ones are never repeated, short facts at most eight times.

    `short` multiplies the share of short answers: the second part of the training wants more of them.
    """
    rng = random.Random(seed)
    weights, makers = [w * (1.0 if m in LONG else short) for w, m in MIX], [m for _, m in MIX]
    seen: Counter[str] = Counter()
    made = 0
    while made < count:
        doc = rng.choices(makers, weights)[0](rng)
        turns = [(careless(rng, u), a) for u, a in doc.turns]
        system = ""
        if turns and rng.random() < 0.3:
            system = rng.choice(SYSTEM)
            if doc.kind in {"field", "fact", "talk"} and rng.random() < 0.3:
                system = rng.choice(SHORT)
                turns = [(u, answers.first_sentence(a)) for u, a in turns]
        key = doc.text + "|".join(a + u for u, a in turns)
        seen[key] += 1
        if seen[key] > (1 if len(key) > 400 else 8):
            continue
        made += 1
        yield Document(doc.kind, turns, system, doc.text)


def lines(seed: int, count: int, short: float) -> list[str]:
    """Documents as JSON lines."""
    return [json.dumps(d.record(), ensure_ascii=False) for d in documents(seed, count, short)]


def write(path: Path, found: list[str]) -> None:
    """Write a corpus file and say what is in it."""
    path.write_text("\n".join(found) + "\n", encoding="utf-8")
    kinds = Counter(json.loads(line)["kind"] for line in found)
    print(
        f"{path.name}: {len(found)} documents, {len(set(found))} distinct,"
        f" {sum(map(len, found)) / 1e6:.1f} MB, {dict(kinds)}"
    )


def main() -> None:
    """Write both parts of the training text and a held-out set that shares no document with them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build"))
    parser.add_argument("--documents", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    first = lines(args.seed, args.documents, short=1.0)
    known = set(first)
    held = [line for line in lines(args.seed + 1, 2_000, short=1.0) if line not in known]
    kept = set(held)
    second = [line for line in lines(args.seed + 10, args.documents * 2 // 3, short=4.0) if line not in kept]
    write(args.out / "train.jsonl", first)
    write(args.out / "second.jsonl", second)
    write(args.out / "heldout.jsonl", held)


if __name__ == "__main__":
    main()
