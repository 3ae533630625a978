"""
What configs/search_sft.py and configs/search_agent.py share: 186 countries, questions about them, and a search engine over the facts.

    data/countries.jsonl --facts--> "The capital of Peru is Lima." x 744 --BM25--> search("capital Peru") -> the two best lines
                         --questions--> "What is the capital of Peru?" -> Lima

A world other than 0 is an invention: the same countries with every column shuffled, so that Peru's capital may be Oslo. Who learns
there learns to read what the search finds, and nothing about this world.

Continents are the United Nations' (Cyprus, Turkey and the Caucasus are in Asia); of a country's languages one is named, and the
currency stands without the country's adjective. Left out: countries whose capital or currency is in dispute or just moving.
"""
import functools
import json
import pathlib
import random
import re

KINDS = dict(capital="What is the capital of {}?", continent="On which continent is {}?", currency="What is the currency of {}?",
             language="Which language is spoken in {}?")


@functools.cache
def table(world: int = 0) -> list[dict]:
    path = pathlib.Path(__file__).parent.parent / "data" / "countries.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    columns = {kind: [row[kind] for row in rows] for kind in KINDS}
    for kind in KINDS if world else ():
        random.Random(f"{world} {kind}").shuffle(columns[kind])
    return [{"country": row["country"]} | {kind: columns[kind][i] for kind in KINDS} for i, row in enumerate(rows)]


def questions(held_out: bool) -> list[dict]:
    """About the real world. Of every fifth country nothing is ever trained on."""
    return [{"input": KINDS[kind].format(row["country"]), "label": row[kind], "metadata": {"kind": kind}}
            for i, row in enumerate(table()) if (i % 5 == 0) == held_out for kind in KINDS]


def words(text: str) -> list[str]:
    return re.findall(r"[\w'-]+", text.lower())


@functools.cache
def index(world: int):
    """BM25 over the facts, made at a process' first search: 20 ms. k1: a word that stands twice in a line of seven ("The capital of
    Guatemala is Guatemala City.") is hardly more than one that stands there once."""
    import bm25s
    facts = [f"The {kind} of {row['country']} is {row[kind]}." for row in table(world) for kind in KINDS]
    bm25 = bm25s.BM25(k1=0.3, b=0.75)
    bm25.index([words(fact) for fact in facts], show_progress=False)
    return bm25, facts


def search(query: str, world: int = 0, k: int = 2) -> list[str]:
    """The k best lines, those without any word of the query left out. 20 microseconds: no thread needed."""
    bm25, facts = index(world)
    known = [word for word in words(query) if word in bm25.vocab_dict]
    if not known:
        return []
    scores = bm25.get_scores(known)                                               # [facts]
    return [facts[i] for i in (-scores).argsort(kind="stable")[:k] if scores[i] > 0]


def information(query: str, world: int = 0) -> str:
    """What the model is shown. The same characters in SFT's conversations and behind a sampled </search>."""
    return "\n<information>\n" + "\n".join(search(query, world) or ["nothing found"]) + "\n</information>\n"
