"""How many greedy texts differ between alone and in a batch. `python tests/benchmark/batch_invariance.py URL`

In float32 it should be none; in bfloat16 a matrix product's rounding depends on the batch's size.
"""

from __future__ import annotations

import asyncio
import sys

import httpx

OPENINGS = (
    "The ship left the harbour and", "My grandmother's recipe begins with", "The three laws of robotics are",
    "def quicksort(items):", "The capital of Norway is", "A haiku about rain:", "In the year 1900,",
    "The best way to learn to swim is", "Photosynthesis is", "Dear Sir or Madam,", "Once upon a time,",
    "The difference between a crow and a raven",
)  # fmt: skip
COMPANY = 20


async def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def complete(prompt: str, **sampling: object) -> str:
            body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "temperature": 0, **sampling}
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            text: str = answer.json()["choices"][0]["text"]
            return text

        alone = [await complete(prompt) for prompt in OPENINGS]
        company = [complete(f"Item {i}:", temperature=1, seed=i) for i in range(COMPANY)]
        together = (await asyncio.gather(*map(complete, OPENINGS), *company))[: len(OPENINGS)]
    differ = sum(one != other for one, other in zip(alone, together, strict=True))
    print(
        f"{differ} of {len(OPENINGS)} greedy texts differ, alone and in a batch of {len(OPENINGS) + COMPANY}"
    )


if __name__ == "__main__":
    asyncio.run(main())
