"""What a reward function is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RewardTask:
    """One response to be judged. Lengths are in tokens; `status` is that of the trajectory."""

    response: str
    gold: Any
    status: str = "completed"
    prompt: str = ""
    response_tokens: int = 0
    max_tokens: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
