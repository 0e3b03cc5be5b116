"""Units of measure: which words are units, and when two quantities are the same."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

# name -> (dimension, size in the base unit of the dimension)
_Sizes = dict[str, int | str]
_LENGTH: _Sizes = {"m": 1, "meter": 1, "metre": 1, "cm": "1/100", "centimeter": "1/100", "centimetre": "1/100"}
_LENGTH |= {"mm": "1/1000", "millimeter": "1/1000", "millimetre": "1/1000", "km": 1000, "kilometer": 1000}
_LENGTH |= {"kilometre": 1000, "in": "254/10000", "inch": "254/10000", "ft": "3048/10000", "foot": "3048/10000"}
_LENGTH |= {"feet": "3048/10000", "yd": "9144/10000", "yard": "9144/10000", "mi": "1609344/1000"}
_LENGTH |= {"mile": "1609344/1000", "米": 1, "厘米": "1/100", "千米": 1000, "公里": 1000, "毫米": "1/1000"}
_MASS: _Sizes = {"g": 1, "gram": 1, "kg": 1000, "kilogram": 1000, "mg": "1/1000", "milligram": "1/1000", "ton": 907185}
_MASS |= {"lb": "45359237/100000", "pound": "45359237/100000", "oz": "45359237/1600000"}
_MASS |= {"ounce": "45359237/1600000", "克": 1, "千克": 1000}
_TIME: _Sizes = {
    "s": 1,
    "sec": 1,
    "second": 1,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hr": 3600,
    "hour": 3600,
    "day": 86400,
}
_TIME |= {"week": 604800, "month": 2629746, "year": 31556952, "yr": 31556952, "decade": 315569520, "ms": "1/1000"}
_TIME |= {"小时": 3600, "分钟": 60, "秒": 1, "天": 86400}
_MONEY: _Sizes = {"dollar": 1, "usd": 1, "cent": "1/100", "penny": "1/100", "nickel": "5/100", "dime": "10/100"}
_VOLUME: _Sizes = {"l": 1, "L": 1, "liter": 1, "litre": 1, "ml": "1/1000", "mL": "1/1000", "milliliter": "1/1000"}
_VOLUME |= {"millilitre": "1/1000", "gallon": "3785411784/1000000000", "gal": "3785411784/1000000000"}
_VOLUME |= {"quart": "946352946/1000000000", "pint": "473176473/1000000000", "cup": "2365882365/10000000000"}
_OTHER: _Sizes = {
    "euro": 1,
    "yuan": 1,
    "元": 1,
    "hz": 1,
    "Hz": 1,
    **dict.fromkeys(("mph", "kph", "kmh", "kmph", "fps"), 1),
    "J": 1,
    "joule": 1,
    "N": 1,
    "newton": 1,
}
_OTHER |= {"W": 1, "watt": 1, "V": 1, "volt": 1, "A": 1, "amp": 1, "Pa": 1, "pascal": 1, "K": 1, "kelvin": 1, "acre": 1}
_OTHER |= {
    "celsius": 1,
    "fahrenheit": 1,
    "rpm": 1,
    "mol": 1,
    "mole": 1,
    "pounds_sterling": 1,
    "rupee": 1,
    "yen": 1,
    "rad": 1,
}
_OTHER |= {"radian": 1, "Ω": 1, "ohm": 1, "kWh": 1, "calorie": 1, "bit": 1, "byte": 1}

_TABLES: dict[str, _Sizes] = {"length": _LENGTH, "mass": _MASS, "time": _TIME, "money": _MONEY, "volume": _VOLUME}
UNITS: dict[str, tuple[str, Fraction]] = {
    name: (dimension, Fraction(size)) for dimension, table in _TABLES.items() for name, size in table.items()
}
UNITS |= {name: (name, Fraction(size)) for name, size in _OTHER.items()}
UNITS |= {name + "s": value for name, value in list(UNITS.items()) if len(name) > 2 and name.isascii()}
UNITS |= {"inches": UNITS["inch"], "feet": UNITS["foot"], "pennies": UNITS["penny"], "hrs": UNITS["hr"]}
UNITS |= {"secs": UNITS["s"], "mins": UNITS["min"], "lbs": UNITS["lb"]}

_RATES = {"mph": ("mile", "hour"), "kph": ("km", "hour"), "kmh": ("km", "hour"), "kmph": ("km", "hour")}
_RATES |= {"fps": ("foot", "second")}

# Words that say "the unit of the question": they agree with any unit.
NEUTRAL = {"unit", "units"}

Unit = tuple[tuple[tuple[str, int], ...], Fraction, frozenset[str]]
NO_UNIT: Unit = ((), Fraction(1), frozenset())


def build_unit(factors: list[tuple[str, int]]) -> Unit:
    """Canonical form of (word, exponent) pairs: dimensions, size in base units, words that are no unit."""
    dimensions: dict[str, int] = {}
    size, nouns = Fraction(1), set()
    for word, exponent in _without_rates(factors):
        known = UNITS.get(word) or UNITS.get(word.lower())
        if known is None:
            if word.lower() not in NEUTRAL:
                nouns.add(word.lower())
            continue
        dimensions[known[0]] = dimensions.get(known[0], 0) + exponent
        size *= known[1] ** exponent
    shape = tuple(sorted((name, power) for name, power in dimensions.items() if power))
    return shape, size, frozenset(nouns)


def _without_rates(factors: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """`mph` as miles per hour."""
    for word, exponent in factors:
        way, time = _RATES.get(word.lower(), (word, None))
        yield way, exponent
        if time is not None:
            yield time, -exponent


def conversion(pred: Unit, gold: Unit) -> Fraction | None:
    """Factor that turns a value in `pred` units into `gold` units; None when the two disagree.

    A missing unit is no disagreement; words that are no unit of measure (`ways`) disagree when they share nothing.
    """
    if not pred[0] and not gold[0]:
        return None if pred[2] and gold[2] and not _stems(pred[2]) & _stems(gold[2]) else Fraction(1)
    if not pred[0] or not gold[0]:
        return Fraction(1)
    if pred[0] != gold[0]:
        return None
    return pred[1] / gold[1]


def _stems(words: frozenset[str]) -> set[str]:
    return {word[:-1] if word.endswith("s") else word for word in words}
