"""How long answers are: a log-normal cut at the limit, shaped like the published 8 x 4090 run."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

# Late in the reference run, limit 8,192: median 3,777, 21.1 % at the limit.
REFERENCE_MEDIAN_SHARE = 3777 / 8192
REFERENCE_TRUNCATED = 0.211


@dataclass(frozen=True)
class LengthModel:
    """Median and share at the limit fix the log-normal."""

    limit: int
    median: float
    truncated: float

    @classmethod
    def like_reference(cls, limit: int) -> LengthModel:
        return cls(limit, limit * REFERENCE_MEDIAN_SHARE, REFERENCE_TRUNCATED)

    def sample(self, count: int, seed: int = 0) -> list[int]:
        """`count` lengths at evenly spaced quantiles, shuffled."""
        normal = NormalDist()
        sigma = math.log(self.limit / self.median) / normal.inv_cdf(1 - self.truncated)
        quantiles = [(i + 0.5) / count for i in range(count)]
        lengths = [self.median * math.exp(sigma * normal.inv_cdf(q)) for q in quantiles]
        clipped = [min(self.limit, max(1, round(length))) for length in lengths]
        random.Random(seed).shuffle(clipped)
        return clipped
