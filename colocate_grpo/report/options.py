"""The options of a run as its config.yaml has them, as far as they are options."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from colocate_grpo.config import Config

# An option of another version; and what YAML has only as lists and texts.
PERMITTED = ("extra_forbidden", "tuple_type", "is_instance_of")


def read_options(path: Path) -> dict[str, Any]:
    """What is in config.yaml; empty where that is not to be read: the rows of a run are worth a report without it."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        # What JSON does not have (a date) is text, as the configuration was resolved.
        plain = json.loads(json.dumps(values, default=str, skipkeys=True))
    except (OSError, yaml.YAMLError, ValueError):  # of YAML a ValueError is a 13th month, or an anchor inside itself
        return {}
    return plain if isinstance(plain, dict) else {}


def usable_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Options without the values that are none of theirs, and by key what is wrong with those.

    What is absent, what another version knows, and what breaks a rule between options stays as it is.
    """
    try:
        Config.model_validate_json(json.dumps(options), strict=True)
    except ValidationError as error:
        found = {_option(e["loc"]): e["msg"] for e in error.errors() if e["type"] not in PERMITTED}
        wrong = {key: message for key, message in found.items() if key and _has(options, key)}
        return _without(options, wrong), {".".join(key): message for key, message in wrong.items()}
    return options, {}


def _option(location: tuple[str | int, ...]) -> tuple[str, ...]:
    """The option in which something is wrong: the list, not its third entry."""
    return tuple(str(part) for part in itertools.takewhile(lambda part: isinstance(part, str), location))


def _has(options: Any, key: tuple[str, ...]) -> bool:
    return not key or (isinstance(options, dict) and key[0] in options and _has(options[key[0]], key[1:]))


def _without(options: dict[str, Any], wrong: dict[tuple[str, ...], str], at: tuple[str, ...] = ()) -> dict[str, Any]:
    kept = {name: value for name, value in options.items() if (*at, name) not in wrong}
    return {name: _without(v, wrong, (*at, name)) if isinstance(v, dict) else v for name, v in kept.items()}
