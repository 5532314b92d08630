"""Common accelerators: memory as their drivers report it, and the bandwidth that their makers state."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MIB = 1 << 20
_GB = 10**9


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    memory_bytes: int
    bandwidth: float  # bytes per second; 0 where it is not known
    source: str = ""  # of the bandwidth, and of memory that no driver was asked for


# NVIDIA's memory is what nvidia-smi calls total; bandwidth is from the documents named (SXM where there are
# several). AMD's and Intel's are all from them, their GB taken as GiB, which is how the memory chips count.
CARDS: dict[str, Card] = {
    name: Card(name, mib * _MIB, gb_per_second * _GB, source)
    for name, mib, gb_per_second, source in (
        ("T4", 15360, 320, "NVIDIA T4 Tensor Core GPU data sheet"),
        ("L4", 23034, 300, "NVIDIA L4 Tensor Core GPU data sheet"),
        ("A10", 23028, 600, "NVIDIA A10 Tensor Core GPU data sheet"),
        ("L40S", 46068, 864, "NVIDIA L40S GPU data sheet"),
        ("RTX-3090", 24576, 936, "NVIDIA Ampere GA102 GPU architecture white paper"),
        ("RTX-4090", 24564, 1008, "NVIDIA Ada GPU architecture white paper"),
        ("RTX-5090", 32607, 1792, "NVIDIA RTX Blackwell GPU architecture white paper"),
        ("A100-40GB", 40960, 1555, "NVIDIA A100 Tensor Core GPU data sheet"),
        ("A100-80GB", 81920, 2039, "NVIDIA A100 Tensor Core GPU data sheet"),
        ("H100", 81559, 3350, "NVIDIA H100 Tensor Core GPU data sheet"),
        ("H200", 143771, 4800, "NVIDIA H200 Tensor Core GPU data sheet"),
        ("B200", 183359, 8000, "NVIDIA DGX B200 data sheet: 64 TB/s of eight"),
        # Drivers show its two dies as two devices, and this is one of them.
        ("MI250X", 64 * 1024, 1638, "AMD Instinct MI250X data sheet: 128 GB and 3.2768 TB/s of two dies"),
        ("MI300X", 192 * 1024, 5300, "AMD Instinct MI300X data sheet"),
        ("MI325X", 256 * 1024, 6000, "AMD Instinct MI325X data sheet"),
        ("Gaudi3", 128 * 1024, 3700, "Intel Gaudi 3 AI accelerator white paper"),
    )
}


def find_card(name: str) -> Card | None:
    """By its name in any case, with or without its hyphens, and with its memory behind it or not: `h100`,
    `H100-80GB`. Raises ValueError where several have that name: `A100`."""
    plain = _plain(name)
    alike = [card for card in CARDS.values() if plain == _plain(card.name)]
    if not alike:
        alike = [card for card in CARDS.values() if _is_named_with_its_memory(plain, card)]
    if not alike:
        alike = [
            card for card in CARDS.values() if re.fullmatch(rf"{re.escape(plain)}\d+gb", _plain(card.name))
        ]
    if len(alike) > 1:
        raise ValueError(f"there is more than one {name}; write {' or '.join(card.name for card in alike)}")
    return alike[0] if alike else None


def _is_named_with_its_memory(plain: str, card: Card) -> bool:
    """Makers' gigabytes are a little more or less than what drivers call total."""
    rest = re.fullmatch(r"([0-9]{1,4})gi?b", plain.removeprefix(_plain(card.name)))
    if rest is None or not plain.startswith(_plain(card.name)):
        return False
    named = int(rest[1]) << 30
    return abs(card.memory_bytes - named) < 0.1 * named


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace(" ", "").replace("_", "")
