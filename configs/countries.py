"""
The world of the search agent: 186 countries, questions about them, and a search engine over what is known of them.

    data/countries.jsonl --> "The capital of Peru is Lima." x 744 --BM25--> search("capital Peru") = the two best lines
                         --> questions(): "What is the capital of Peru?", Lima

Worlds other than 0 are made up: the same countries with every column shuffled, so Peru's capital may be Oslo.

Continents are the United Nations' (so Cyprus, Turkey and the Caucasus are in Asia); one of a country's languages is named; a
currency has no adjective. Left out: countries whose capital or currency is disputed or just moving.
"""
import functools
import json
import pathlib
import random
import re

KINDS = dict(capital="What is the capital of {}?", continent="On which continent is {}?",
             currency="What is the currency of {}?", language="Which language is spoken in {}?")
HOW_TO = ("Answer the question. To look something up, write <search> words </search>; what is found comes back between "
          "<information> and </information>. Then write the bare answer as <answer> words </answer>.")


@functools.cache
def table(world: int = 0) -> list[dict]:
    rows = [json.loads(line) for line in (pathlib.Path(__file__).parent.parent / "data/countries.jsonl").open()]
    for kind in KINDS if world else ():
        column = random.Random(f"{world} {kind}").sample([row[kind] for row in rows], len(rows))
        rows = [row | {kind: value} for row, value in zip(rows, column)]
    return rows


def questions(held_out: bool) -> list[dict]:
    """About world 0. Of every fifth country nothing is ever trained on. The small model's template leaves HOW_TO out."""
    return [{"input": [{"role": "system", "content": HOW_TO}, {"role": "user", "content": question.format(row["country"])}],
             "label": row[kind]}
            for i, row in enumerate(table()) if (i % 5 == 0) == held_out for kind, question in KINDS.items()]


def words(text: str) -> list[str]:
    return re.findall(r"[\w'-]+", text.lower())


@functools.cache
def index(world: int):
    """BM25 over the facts, made at the first search. k1 is low: a line that names Guatemala twice is no better for it."""
    import bm25s
    facts = [f"The {kind} of {row['country']} is {row[kind]}." for row in table(world) for kind in KINDS]
    bm25 = bm25s.BM25(k1=0.3, b=0.75)
    bm25.index([words(fact) for fact in facts], show_progress=False)
    return bm25, facts


def search(query: str, world: int = 0, k: int = 2) -> list[str]:
    """The k best lines; none without a word of the query. 20 microseconds, so no thread is needed."""
    bm25, facts = index(world)
    known = [word for word in words(query) if word in bm25.vocab_dict]
    if not known:
        return []
    scores = bm25.get_scores(known)                                                               # [facts]
    return [facts[i] for i in (-scores).argsort(kind="stable")[:k] if scores[i] > 0]


def information(query: str, world: int = 0) -> str:
    """What the model is shown: the same characters in SFT's conversations and behind a sampled </search>."""
    return "\n<information>\n" + "\n".join(search(query, world) or ["nothing found"]) + "\n</information>\n"
