"""Small facts, one question and one answer each: colours, opposites, animals, the calendar, words and numbers."""

import random

from grammar import an, capital, columns, commas, pairs, spin
from stories import ANIMALS, DAYS, WORDS

Turn = tuple[str, str]  # what the user says, what the model answers

MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
OPPOSITES = [tuple(p.split()) for p in commas(WORDS["opposite"])]
GROUPS = {k: v.split() for k, v in (line.split(" = ") for line in WORDS["group"])}
RHYMES = [r.split() for r in commas(WORDS["rhyme"])]
UNCOUNTED = commas(["music,bread,honey,rain,snow,wind,winter,summer,spring,autumn,courage,patience,kindness,fire,ice"])
UNIQUE = ["sun", "moon", "sea", "night", "morning", "earth"]
NO_HOUSE = ["sea", "savanna", "pond", "riverbank", "colony", "shell"]
THINGS = [
    "apples",
    "pods",
    "nuts",
    "shells",
    "books",
    "boats",
    "replicas",
    "stars",
    "eggs",
    "kites",
    "coins",
    "requests",
]
SEASONS = ["winter"] * 2 + ["spring"] * 3 + ["summer"] * 3 + ["autumn"] * 3 + ["winter"]


def numbers(rng: random.Random) -> list[Turn]:
    """Sums, counting and comparing, nothing above twenty."""
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    small, big = min(a, b), max(a, b)
    x, y = rng.randint(0, 10), rng.randint(0, 10)
    thing = rng.choice(THINGS)
    name = rng.choice(commas(WORDS["girl"]) + commas(WORDS["boy"]))
    w = NUMBERS
    options: list[Turn] = [
        (f"{{What is|How much is|}} {x} {{plus|+}} {y}?", f"{{{x} plus {y} is {x + y}.|{x + y}.|It is {x + y}.}}"),
        (
            f"{{What is|How much is|}} {big} {{minus|-}} {small}?",
            f"{{{big} minus {small} is {big - small}.|{big - small}.}}",
        ),
        (f"What is {w[x]} plus {w[y]}?", f"{capital(w[x])} plus {w[y]} is {w[x + y]}."),
        (
            f"Which number is {{larger|bigger}}, {a} or {b}?",
            f"{big} is larger than {small}." if a != b else "They are the same.",
        ),
        (
            f"Which number is smaller, {a} or {b}?",
            f"{small} is smaller than {big}." if a != b else "They are the same.",
        ),
        (f"Which number comes after {x}?", f"After {x} comes {x + 1}."),
        (f"Which number comes before {x + 1}?", f"Before {x + 1} comes {x}."),
        (f"Count from {small} to {big}.", ", ".join(str(i) for i in range(small, big + 1)) + "."),
        (f"Count {{back|down}} from {x}.", ", ".join(str(i) for i in range(x, -1, -1)) + "."),
        (f"Count to {w[max(x, 2)]}.", capital(", ".join(w[1 : max(x, 2) + 1])) + "."),
        (f"Is {a} an even number?", f"Yes, {a} is even." if a % 2 == 0 else f"No, {a} is odd."),
        (f"What is {{double|twice}} {x}?", f"Twice {x} is {2 * x}."),
        (f"What is half of {2 * x}?", f"Half of {2 * x} is {x}."),
        (f"How do you write {a} as a word?", f"{a} is written {w[a]}."),
        (
            f"{name} has {x} {thing} and gets {y} more. How many {thing} does {name} have now?",
            f"{name} now has {x + y} {thing}, because {x} plus {y} is {x + y}.",
        ),
        (
            f"{name} has {big} {thing} and gives away {small}. How many are left?",
            f"{big - small} {thing} are left, because {big} minus {small} is {big - small}.",
        ),
        (f"I have {x} replicas and add {y}. How many do I have?", f"You have {x + y} replicas."),
        (
            f"Each replica takes {max(y, 2)} requests. How many do 2 replicas take?",
            f"Two replicas take {2 * max(y, 2)} requests.",
        ),
    ]
    question, answer = rng.choice(options)
    return [(spin(rng, question), spin(rng, answer))]


def fact(rng: random.Random) -> list[Turn]:
    """Colours, opposites, animals, days, capitals and other small facts."""
    return [tuple(spin(rng, part) for part in rng.choice(FACTS)(rng))]


def colours(rng: random.Random) -> Turn:
    """The colour of a thing, or a mixed colour."""
    if rng.random() < 0.4:
        mix, result = rng.choice(pairs(WORDS["mix"]))
        return (
            f"{{What colour do you get from {mix}?|What do {mix} make?|Mix {mix}.}}",
            f"{{{capital(mix)} make {result}.|You get {result}.}}",
        )
    thing, colour = rng.choice(pairs(WORDS["thing_colour"]))
    return (
        f"{{What colour is {thing}?|What is the colour of {thing}?|Tell me the colour of {thing}.}}",
        f"{capital(thing)} is {colour}.",
    )


def opposites(rng: random.Random) -> Turn:
    """The opposite of a word."""
    a, b = rng.sample(rng.choice(OPPOSITES), 2)
    return (
        f"{{What is the opposite of {a}?|Say the opposite of {a}.|Opposite of {a}?}}",
        f"{{The opposite of {a} is {b}.|{capital(b)}.}}",
    )


def animals(rng: random.Random) -> Turn:
    """What an animal says, eats, where it lives, and the like."""
    name, home, food, place, sound, young, legs, colour = rng.choice(ANIMALS)
    n = NUMBERS[int(legs)] if legs != "0" else "no"
    where = f"at the {place}" if home in NO_HOUSE else f"in {{a {home}|the {place}}}"
    return rng.choice(
        [
            (f"What {{sound|noise}} does a {name} make?", f"A {name} {sound}."),
            (f"Where does a {name} live?", f"A {name} lives {where}."),
            (f"What does a {name} {{eat|like to eat}}?", f"A {name} likes {food}."),
            (f"What is a young {name} called?", f"A young {name} is called a {young}."),
            (f"How many legs does a {name} have?", f"A {name} has {n} legs."),
            (f"Is a {name} an animal?", f"Yes, a {name} is an animal."),
            (
                f"{{What is a {name}?|Describe a {name}.|Tell me about the {name}.}}",
                f"A {name} is an animal. It has {n} legs, it likes {food}, and its young is called a {young}. "
                f"{{It is often {colour}.|It {sound}.}}",
            ),
        ]
    )


def calendar(rng: random.Random) -> Turn:
    """Days, months and seasons."""
    i, m = rng.randrange(7), rng.randrange(12)
    season = SEASONS[m]
    return rng.choice(
        [
            (f"Which day comes after {DAYS[i]}?", f"{DAYS[(i + 1) % 7]} comes after {DAYS[i]}."),
            (f"Which day comes before {DAYS[i]}?", f"{DAYS[i - 1]} comes before {DAYS[i]}."),
            (
                f"If today is {DAYS[i]}, what day is tomorrow?",
                f"If today is {DAYS[i]}, tomorrow is {DAYS[(i + 1) % 7]}.",
            ),
            (f"Which month comes after {MONTHS[m]}?", f"{MONTHS[(m + 1) % 12]} comes after {MONTHS[m]}."),
            (f"In which season is {MONTHS[m]}?", f"In the north {MONTHS[m]} is in {season}."),
            ("{How many days are in a week?|How many days does a week have?}", "A week has seven days."),
            (
                "{What are the days of the week?|Name the days of the week.|List the days.}",
                ", ".join(DAYS[:6]) + " and Sunday.",
            ),
            ("{What are the months of the year?|Name the months.}", ", ".join(MONTHS[:11]) + " and December."),
            (
                "{What are the four seasons?|Name the seasons.}",
                "The four seasons are spring, summer, autumn and winter.",
            ),
            ("How many {months are in a year|months does a year have}?", "A year has twelve months."),
        ]
    )


def words(rng: random.Random) -> Turn:
    """Spelling, rhymes, greetings, capitals, lists and definitions."""
    group = rng.choice(list(GROUPS))
    items = rng.sample(GROUPS[group], min(rng.randint(2, 5), len(GROUPS[group])))
    listed = ", ".join(items[:-1]) + " and " + items[-1]
    odd_group = rng.choice(
        [g for g in GROUPS if g not in {group, "seasons", "metrics"} and not set(GROUPS[g]) & set(GROUPS[group])]
    )
    odd = rng.choice(GROUPS[odd_group])
    mixed = [*items[:3], odd]
    rng.shuffle(mixed)
    rhyme = rng.sample(rng.choice(RHYMES), 2)
    country, city = rng.choice(pairs(WORDS["capital"]))
    kind = rng.choice(["hello", "thanks"])
    language, greeting = rng.choice(pairs(WORDS[kind]))
    term, meaning = rng.choice(columns(WORDS["define"]))
    word = rng.choice([*items, term.split()[0], "pod", "canary"])
    pseudo = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
    name = rng.choice([capital(pseudo), rng.choice(commas(WORDS["girl"]))])
    a = term if term in UNCOUNTED else an("a " + term)
    a = "the " + term if term in UNIQUE else a
    return rng.choice(
        [
            (f"{{Name|List|Give me|Tell me}} {NUMBERS[len(items)]} {group}.", f"{capital(listed)}."),
            (
                f"Which word does not belong: {', '.join(mixed)}?",
                f"{capital(odd)} does not belong; the others are {group}.",
            ),
            (
                f"{{Which word rhymes with {rhyme[0]}?|What rhymes with {rhyme[0]}?|Find a rhyme for {rhyme[0]}.}}",
                f"{capital(rhyme[1])} rhymes with {rhyme[0]}.",
            ),
            (
                f"{{What is the capital of {country}?|Which city is the capital of {country}?}}",
                f"The capital of {country} is {city}.",
            ),
            (
                f"{{How do you say {kind} in {language}?|What is {kind} in {language}?|Say {kind} in {language}.}}",
                f"In {language} you say: {greeting}.",
            ),
            (
                f"{{What is|What is|Explain|Define}} {a}?".replace("Explain}", "What exactly is}"),
                f"{capital(a)} is {meaning}.",
            ),
            (f"{{Spell the word {word}.|How do you spell {word}?}}", f"{capital(word)} is spelled {'-'.join(word)}."),
            (f"What is the first letter of {word}?", f"The first letter of {word} is {word[0]}."),
            (f"{{Say hello to {name}.|Greet {name}.}}", f"{{Hello, {name}! It is nice to meet you.|Hello, {name}!}}"),
            (
                f"My name is {name}.",
                f"{{Hello|Nice to meet you}}, {name}! "
                f"{{What can I do for you?|How can I help you?|Would you like a story?}}",
            ),
            (f"{{Repeat|Say}}: {' '.join(items)}.", f"{capital(' '.join(items))}."),
        ]
    )


FACTS = [colours, opposites, animals, animals, calendar, words, words, words]
