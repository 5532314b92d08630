"""Prompts of about so many tokens: random common words, nearly all one token in the usual vocabularies."""

from __future__ import annotations

import random

_WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community
name president team minute idea body information back parent face others level office door health
person art war history party result change morning reason research girl guy moment air teacher force
education foot boy age policy music market sense report river field tree stone ship light
""".split()  # noqa: SIM905 - a hundred quotes read worse


def make_prompt(seed: int, index: int, tokens: int) -> str:
    """The same words for the same seed and index; another index shares no beginning with it."""
    rng = random.Random(f"{seed}/{index}")
    return " ".join(rng.choices(_WORDS, k=tokens))
