"""Configuration files: YAML and command line overrides in, a checked Config or a one-line error out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic_core import ErrorDetails

from colocate_grpo.checkpoint.files import write_text
from colocate_grpo.config import Config
from colocate_grpo.errors import ConfigError, nearest
from colocate_grpo.shipped import config_names, shipped_config

Path_ = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader without YAML 1.1's traps, and for which a duplicate key is an error.

    `1e-6` is a number, `010` is ten (YAML 1.1: eight), and `1:30` and a date are texts (YAML 1.1: ninety, a date).
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value}: given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text that `_Loader` or YAML 1.1 would read as something else."""


_INT = re.compile(r"^[-+]?\d[\d_]*$")
_FLOAT = re.compile(
    r"^[-+]?(\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+|\d[\d_]*\.[\d_]*|\.\d[\d_]*([eE][-+]?\d+)?)$"
    r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
)
_REPLACED = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value.replace("_", "")))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `section.key=value` overrides, and check the whole.

    A shipped configuration is found by its name from anywhere. Raises ConfigError with file and line (or the
    override), the value, what is allowed, and the nearest name.
    """
    path = _find(Path(path))
    values, lines = _read(path)
    origin = {key: f"{path}:{line}" for key, line in lines.items()}
    for text in overrides:
        _override(values, text, origin)
    return check_config(values, origin, default_origin=str(path))


def check_config(values: dict[str, Any], origin: dict[Path_, str], default_origin: str) -> Config:
    """Validate plain values; `origin` says where each key came from."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:  # pydantic's many-line text becomes one line a user can act on
        raise ConfigError(_first_problem(error, origin, default_origin)) from None


def dump_config(config: Config, path: Path) -> None:
    """Write the resolved configuration; `load_config` reads it back to an equal one."""
    write_text(path, to_yaml(config.model_dump(mode="json")))


def to_yaml(values: dict[str, Any]) -> str:
    """Text that `load_config` reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def changes(old: Config, new: Config) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """(identity, resumable) options that differ, each `section.key -> (old, new)`."""
    identity: dict[str, tuple[Any, Any]] = {}
    resumable: dict[str, tuple[Any, Any]] = {}
    for key, is_identity, before, after in _compare(old, new):
        if before != after:
            (identity if is_identity else resumable)[key] = (before, after)
    return identity, resumable


def identity_changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Options that make `new` another run than `old`."""
    return changes(old, new)[0]


def explain_rows() -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, sentence) of every option; identity options are marked with `*`."""
    yield from _explain(Config, "")


def _find(path: Path) -> Path:
    found = path if path.is_file() else shipped_config(path)
    if found is None and path.is_dir():
        raise ConfigError(f"{path}: a directory, not a configuration file")
    if found is None:
        known = [*_siblings(path), *config_names()]
        raise ConfigError(f"{path}: no such configuration file{nearest(path.name, known)}")
    return found


def _read(path: Path) -> tuple[dict[str, Any], dict[Path_, int]]:
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML text file ({str(error).splitlines()[0]})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1: a configuration is a mapping of sections, got {type(values).__name__}")
    assert node is not None
    return values, dict(_lines(node, ()))


def _siblings(path: Path) -> list[str]:
    return [p.name for p in path.parent.glob("*.yaml") if p.name != path.name] if path.parent.is_dir() else []


def _lines(node: yaml.Node, prefix: Path_) -> Iterator[tuple[Path_, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*prefix, key.value), key.start_mark.line + 1
            yield from _lines(value, (*prefix, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield (*prefix, i), value.start_mark.line + 1
            yield from _lines(value, (*prefix, i))


def _override(values: dict[str, Any], text: str, origin: dict[Path_, str]) -> None:
    key, equals, raw = text.partition("=")
    parts: list[str | int] = [int(p) if p.isdigit() else p for p in key.strip().split(".")]
    if not equals or len(parts) < 2:
        raise ConfigError(f"{text!r}: an override has the form section.key=value")
    target: Any = values
    for part, following in itertools.pairwise(parts):
        target = _child(target, part, following, text)
    if isinstance(target, list) and not (isinstance(parts[-1], int) and parts[-1] < len(target)):
        raise ConfigError(f"{text!r}: {parts[-1]} is no index of a list of {len(target)}")
    target[parts[-1]] = _override_value(parts, raw)
    for depth in range(1, len(parts)):
        origin.setdefault(tuple(parts[:depth]), f"override {text!r}")
    origin[tuple(parts)] = f"override {text!r}"


def _override_value(parts: Sequence[str | int], raw: str) -> Any:
    """`raw` as YAML; as it stands where it is no YAML, or where the option is a text (`run.name=7`)."""
    try:
        value = yaml.load(raw, Loader=_Loader) if raw else ""
    except yaml.YAMLError:
        return raw  # such as a Windows path or a template
    return raw if _is_text(parts) and not isinstance(value, str | NoneType) else value


def _is_text(parts: Sequence[str | int]) -> bool:
    section = _section_at(parts[:-1])
    field = section.model_fields.get(str(parts[-1])) if section else None
    annotation = field.annotation if field else None
    alternatives = get_args(annotation) if NoneType in get_args(annotation) else (annotation,)
    return str in alternatives or Path in alternatives


def _child(target: Any, part: str | int, following: str | int, text: str) -> Any:
    if isinstance(target, list):
        if not isinstance(part, int) or part >= len(target):
            raise ConfigError(f"{text!r}: {part} is no index of a list of {len(target)}")
        child = target[part]
    else:
        child = target.get(part)
        if child is None:
            child = target[part] = {}
    if not isinstance(child, dict | list) or (isinstance(child, list) and not isinstance(following, int)):
        raise ConfigError(f"{text!r}: {part} is no section")
    return child


def _first_problem(error: ValidationError, origin: dict[Path_, str], default_origin: str) -> str:
    problems = error.errors()
    # An unknown key explains a missing one, so it is told first.
    problem = min(problems, key=lambda p: p["type"] != "extra_forbidden")
    where = _origin_of(problem, origin, default_origin)
    more = f" [and {len(problems) - 1} more]" if len(problems) > 1 else ""
    return f"{where}: {_describe(problem)}{more}"


def _origin_of(problem: ErrorDetails, origin: dict[Path_, str], default_origin: str) -> str:
    loc: Path_ = tuple(problem["loc"])
    if not loc and (match := re.match(r"Value error, ([a-z_.]+):", problem["msg"])):
        loc = tuple(match[1].split("."))
    while loc and loc not in origin:
        loc = loc[:-1]
    return origin.get(loc, default_origin)


def _describe(problem: ErrorDetails) -> str:
    loc = tuple(problem["loc"])
    key = ".".join(map(str, loc))
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key{_meant(loc, problem['input'])}"
    if problem["type"] == "missing":
        return f"{key}: is required"
    if problem["type"] == "value_error":
        text = problem["msg"].removeprefix("Value error, ")
        return text if not key else f"{key}: {text}"
    value = problem["input"]
    hint = nearest(value, _expected(problem)) if isinstance(value, str) else ""
    message = problem["msg"][0].lower() + problem["msg"][1:]
    message = message.replace("valid string", "text in quotes") if problem["type"] == "string_type" else message
    return f"{key}: {value!r} is not allowed: {re.sub(r' or instance of .*', '', message)}{hint}"


def _meant(loc: Sequence[str | int], value: Any) -> str:
    """A hint at the option that an unknown key may mean: the same name elsewhere, or the nearest name here."""
    here = _names_at(loc[:-1])
    leaf = next(iter(value), "") if isinstance(value, dict) else loc[-1]
    elsewhere = [key for key, *_ in explain_rows() if key.split(".")[-1] == leaf]
    found = f" (did you mean {' or '.join(elsewhere[:3])}?)" if elsewhere else ""
    close = nearest(str(loc[-1]), here)
    either = close or found if isinstance(value, dict) else found or close
    return either or f" (allowed: {', '.join(here)})"


def _expected(problem: ErrorDetails) -> list[str]:
    return re.findall(r"'([^']*)'", str(problem.get("ctx", {}).get("expected", "")))


def _section_at(loc: Sequence[str | int]) -> type[BaseModel] | None:
    model: Any = Config
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if model else None
        model = _model_of(field.annotation) if field else None
    return model


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in get_args(annotation) if (m := _model_of(a))), None)


def _names_at(loc: Sequence[str | int]) -> list[str]:
    section = _section_at(loc)
    return list(section.model_fields) if section else []


def _is_identity(field: Any) -> bool:
    return bool((field.json_schema_extra or {}).get("identity"))


def _compare(old: BaseModel, new: BaseModel, prefix: str = "") -> Iterator[tuple[str, bool, Any, Any]]:
    for name, field in type(new).model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(after, BaseModel):
            yield from _compare(before, after, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _is_identity(field), before, after


def _explain(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in model.model_fields.items():
        section = _model_of(field.annotation)
        is_list = get_args(field.annotation) != ()
        if section is not None and not is_list:
            yield from _explain(section, f"{prefix}{name}.")
            continue
        kind = "seconds" if any(isinstance(m, BeforeValidator) for m in field.metadata) else _kind(field.annotation)
        default = "required" if field.is_required() else _as_yaml(field.get_default(call_default_factory=True))
        mark = " *" if _is_identity(field) else ""
        yield f"{prefix}{name}", kind, default, f"{field.description}{mark}"
        if section is not None:
            yield from _explain(section, f"{prefix}{name}.N.")


def _kind(annotation: Any) -> str:
    """A type in a user's words: `int`, `text or null`, `grpo | rloo`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(args)
    if origin is Annotated:
        return _kind(args[0])
    if NoneType in args:
        return " or ".join([*(_kind(a) for a in args if a is not NoneType), "null"])
    plain = {str: "text", Path: "path", dict: "mapping", tuple: "list", list: "list"}
    return plain.get(origin or annotation, annotation.__name__)


def _as_yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=1000).removesuffix("...\n").strip()
