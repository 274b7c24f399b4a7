"""Fill-in-the-middle: a document whose middle stands at its end.

Of Bavarian et al. 2022 (arXiv:2207.14255): two characters of a document, uniformly drawn, cut it into prefix,
middle and suffix. PSM: ``<prefix> prefix <suffix> suffix <middle> middle``; SPM, their variant for training
with both: ``<prefix><suffix> suffix <middle> prefix middle``. Each part is encoded by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from picotron_ray.config.schema.tokenizer import FillInTheMiddle
from picotron_ray.data.tokenizer import Tokenizer
from picotron_ray.errors import DataError


@dataclass(frozen=True, slots=True)
class Woven:
    """Texts of a document, and the token ids before each of them."""

    texts: tuple[str, ...]
    before: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MiddleMover:
    """Rearranges documents.

    Fields:
        asked: the config's section.
        prefix, middle, suffix: token ids.
    """

    asked: FillInTheMiddle
    prefix: int
    middle: int
    suffix: int

    @staticmethod
    def of(asked: FillInTheMiddle, tokenizer: Tokenizer) -> MiddleMover:
        """Look the three tokens up. Raises DataError for one that the tokenizer does not have."""
        ids = []
        for key in ("prefix", "middle", "suffix"):
            token = getattr(asked, key)
            found = tokenizer.id_of(token)
            if found is None:
                raise DataError(
                    f"data.fill_in_the_middle.{key}: saw {token!r}, which is no token of data.tokenizer; name"
                    " the one that it has for this"
                )
            ids.append(found)
        return MiddleMover(asked, *ids)

    def moved(self, text: str) -> Woven:
        """Rearrange a document, or leave it as it is: a pure function of the seed and the text.

        >>> mover = MiddleMover(FillInTheMiddle(rate=1, spm_rate=0), 7, 8, 9)
        >>> found = mover.moved("abcdef")
        >>> found.before, "".join((found.texts[0], found.texts[2], found.texts[1]))
        (((7,), (9,), (8,)), 'abcdef')
        """
        hasher = xxhash.xxh3_64(text.encode("utf-8", "replace"), seed=self.asked.seed & (2**64 - 1))
        digest = hasher.digest()
        chosen, order, first, second = (_uniform(digest, draw) for draw in range(4))
        if not text or chosen >= self.asked.rate:
            return Woven((text,), ((),))
        start, end = sorted(int(draw * (len(text) + 1)) for draw in (first, second))
        prefix, middle, suffix = text[:start], text[start:end], text[end:]
        if order < self.asked.spm_rate:
            return Woven((suffix, prefix, middle), ((self.prefix, self.suffix), (self.middle,), ()))
        return Woven((prefix, suffix, middle), ((self.prefix,), (self.suffix,), (self.middle,)))


def _uniform(digest: bytes, draw: int) -> float:
    """Return a number from 0 to below 1 (53 bits of a hash)."""
    return (xxhash.xxh3_64_intdigest(digest, seed=draw) >> 11) / 2.0**53
