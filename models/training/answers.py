"""Answers of more than a fact: the words of the product's field, advice, small talk, poems, and not knowing."""

import random
import re

from facts import Turn
from grammar import TEXT, an, capital, expand, sections, sentences, spin
from stories import PLOTS, cast

FIELD = sections("field.txt")
POEMS = sections("poems.txt")
BARE = [
    "autoscaling",
    "load balancing",
    "batching",
    "quantization",
    "preemption",
    "prefill",
    "decode",
    "paged attention",
    "speculative decoding",
    "leader election",
    "scale to zero",
    "latency",
    "throughput",
    "load shedding",
    "temperature",
    "Slipway",
]
DEFINITE = ["KV cache", "gateway", "queue depth", "time to first token"]
UNKNOWN = (
    "the history of {Rome|Japan|the railway|chess}|the {price|weight|age} of {gold|a tram|the moon|my car}|"
    "{quantum physics|algebra|chemistry|philosophy|tax law|football results|politics|the stock market}|"
    "the {president|mayor|king} of {a country|my town}|the {latest news|news of today}|"
    "{Python|Java|Rust|SQL|a regular expression}|the {film|band|game} {everyone talks about|of the year}|"
    "the best {phone|laptop|hotel|restaurant}"
)


def article(noun: str) -> str:
    """The noun as one says it in a question: `a pod`, `the KV cache`, `autoscaling`."""
    if noun in BARE:
        return noun
    return "the " + noun if noun in DEFINITE else an("a " + noun)


def concepts() -> dict[str, dict[str, list[str]]]:
    """The field's words: definition, why, picture (`x`) and use in Slipway."""
    found: dict[str, dict[str, list[str]]] = {}
    name = ""
    for line in (TEXT / "field.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("[concept]"):
            name = line.removeprefix("[concept] ")
            found[name] = {}
        elif line.startswith("["):
            break
        elif line:
            key, _, text = line.partition(": ")
            found[name].setdefault(key, []).append(text)
    return found


CONCEPTS = concepts()


def say(rng: random.Random, name: str, keys: str) -> str:
    """Join one wording of each wanted part of a concept."""
    parts = [spin(rng, rng.choice(CONCEPTS[name][k])) for k in keys]
    return " ".join(p if p.endswith((".", "!", "?")) else p + "." for p in parts)


def concept(rng: random.Random) -> list[Turn]:
    """One word of the field, in one turn or in a little talk."""
    name = rng.choice(list(CONCEPTS))
    a = article(name)
    what = expand(rng, "{What is|What is|What is|Explain|Define|Tell me about|Can you explain|What does|Describe|}")
    if what == "What does":
        question = f"What does {name} mean?"
    elif what == "What is":
        question = spin(rng, f"What is {a}{{?|?|?| in Kubernetes?|, exactly?| in simple words?}}")
    elif what == "":
        question = spin(rng, f"{{{capital(a)}?|What's {a}?|I do not know what {a} is.|Please explain {a}.}}")
    else:
        question = f"{what} {a}{'?' if what == 'Can you explain' else '.'}"
    turns = [(question, say(rng, name, rng.choice(["d", "d", "dx", "dw", "du", "dwx", "dxu"])))]
    more = [
        (spin(rng, f"{{Why is that useful?|Why do we need {a}?|What is it good for?|Why?}}"), "w"),
        (
            spin(
                rng, "{Can you give me an example?|Explain it to a child.|What is it like?|Can you say it more simply?}"
            ),
            "x",
        ),
        (spin(rng, "{And in Slipway?|How does Slipway use it?|What does Slipway do with it?}"), "u"),
    ]
    if rng.random() < 0.35:
        for question, key in rng.sample(more, rng.randint(1, 3)):
            turns.append((question, say(rng, name, key)))
    elif rng.random() < 0.35:
        question, key = rng.choice(
            [
                (spin(rng, f"{{Why do we need {a}?|What is {a} good for?|Why is {a} useful?}}"), "wd"),
                (
                    spin(
                        rng,
                        f"{{Explain {a} to a child.|Explain {a} simply.|"
                        f"What is {a} like?|Explain {a} like I am five.}}",
                    ),
                    "x",
                ),
                (spin(rng, f"{{How does Slipway use {a}?|What does Slipway do with {a}?}}"), "u"),
                (
                    spin(
                        rng,
                        f"{{Explain {a} in detail.|Tell me everything about {a}.|Explain {a} and give an example.}}",
                    ),
                    "dwxu",
                ),
            ]
        )
        if name == "Slipway" and key == "u":
            question = "What are the parts of Slipway?"
        turns = [(question, say(rng, name, key))]
    return turns


def difference(rng: random.Random) -> list[Turn]:
    """What tells two words of the field apart."""
    a, b, text = rng.choice(columns_spun(FIELD["differ"]))
    if rng.random() < 0.3:
        a, b = b, a
    question = spin(
        rng,
        f"{{What is the difference between {a} and {b}?|How is {a} different from {b}?|"
        f"{capital(a)} or {b}: what is the difference?}}",
    )
    return [(question, spin(rng, text))]


def columns_spun(lines: list[str]) -> list[list[str]]:
    """Split `a | b | c` where the last field may hold choices with bars of their own."""
    return [[f.strip() for f in re.split(r" \| ", line)] for line in lines]


def process(rng: random.Random) -> list[Turn]:
    """How something happens, step by step."""
    question, text = rng.choice(columns_spun(FIELD["process"]))
    if rng.random() < 0.2:
        question = "Can you tell me: " + question[0].lower() + question[1:]
    return [(question, spin(rng, text))]


def decide(rng: random.Random) -> list[Turn]:
    """Numbers of a service in, a scaling decision with its reason out."""
    n, kv, queue = rng.randint(1, 12), rng.randint(1, 19) * 5, rng.choice([0, 0, 1, 2, 3, 5, 8, 12, 15, 20])
    waiting = "no requests are" if queue == 0 else "one request is" if queue == 1 else f"{queue} requests are"
    question = spin(
        rng,
        f"{{A service has|We have|My service has}} {n} replica{'s' * (n > 1)}. "
        f"The KV cache is at {kv} per cent and {waiting} waiting. "
        "{What should the autoscaler do?|What now?|Should we scale?}",
    )
    if kv > 80 or queue > 10:
        why = f"the KV cache is at {kv} per cent" if kv > 80 else f"{queue} requests are waiting"
        return [
            (
                question,
                spin(
                    rng, f"{{Add one replica|It should add a replica}}, because {why}. Then there are {n + 1} replicas."
                ),
            )
        ]
    if kv < 30 and queue == 0 and n > 1:
        left = f"{n - 1} replicas are" if n > 2 else "1 replica is"
        return [
            (
                question,
                spin(
                    rng,
                    f"It can drain one replica, because the KV cache is at {kv} per cent and nobody is waiting. "
                    f"Then {left} left.",
                ),
            )
        ]
    return [
        (
            question,
            spin(
                rng,
                f"{{Nothing|Keep {n} replica{'s' * (n > 1)}}}. The load is {{fine|within its bounds}}, "
                f"so the number can stay as it is.",
            ),
        )
    ]


def talk(rng: random.Random) -> list[Turn]:
    """One exchange of small talk."""
    asked, answered = rng.choice(TALK)
    return [(spin(rng, rng.choice(asked)), spin(rng, rng.choice(answered)))]


def read_talk() -> list[tuple[list[str], list[str]]]:
    """Read `talk.txt`: questions and answers that fit each other in any combination."""
    found: list[tuple[list[str], list[str]]] = []
    for line in (TEXT / "talk.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("="):
            found.append(([], []))
        elif line:
            found[-1][line.startswith("a:")].append(line[3:])
    return found


TALK = read_talk()


def unknown(rng: random.Random) -> list[Turn]:
    """Say openly what the model does not know; a small model that admits it is pleasant to test with."""
    topic = expand(rng, "{" + UNKNOWN + "}")
    question = spin(
        rng,
        f"{{What do you know about|Tell me about|Can you explain|Help me with|I have a question about}} {topic}{{?|.}}",
    )
    answer = spin(
        rng,
        f"{{I am sorry, I|I}} do not know {{anything|much}} about {topic}. "
        f"{{I am only a very small model.|That is too big for me.|A larger model could tell you.}} "
        "{Would you like a story instead?|I can tell you a story or explain what a pod is.|"
        "Ask me about a pod, a fox or a colour.}",
    )
    return [(question, answer)]


def poem(rng: random.Random) -> list[Turn]:
    """Four lines in two rhymes, or three lines without."""
    names = cast(rng, rng.choice(PLOTS)) | {"sits": rng.choice(["sits", "sleeps", "dreams", "waits"])}
    if rng.random() < 0.3:
        text = "\n".join(capital(line.strip()) for line in spin(rng, rng.choice(POEMS["haiku"]), names).split("/"))
        return [(spin(rng, "{Write|Make} a haiku{| about nature}."), text)]
    keys = ["line_a", "line_b", "line_c", "line_d"]
    text = "\n".join(capital(spin(rng, rng.choice(POEMS[k]), names)) for k in keys)
    about = (
        f" about {an('a ' + names['kind'])}"
        if names["kind"] in text
        else rng.choice(["", " about the night" if "night" in text else ""])
    )
    return [(spin(rng, "{Write|Make|Tell me|I would like} a {short poem|poem|little poem}" + about + "."), text)]


def first_sentence(text: str) -> str:
    """The first sentence, for those who ask for a short answer."""
    return sentences(text)[0].strip()
