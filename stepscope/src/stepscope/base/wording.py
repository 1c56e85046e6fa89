"""Numbers, units and names as messages show them."""

import math
import re
import unicodedata

# Categories of `stepscope.traces` in plain words.
PLAIN_NAMES = {
    "Kernel": "kernels",
    "Memcpy": "copies",
    "Memset": "memory fills",
    "Communication": "communication",
    "Runtime": "runtime calls",
    "DataLoader": "loading",
    "CPU Exec": "operators on the CPU",
    "Other": "other",
}
_PATH = re.compile(r"""(["'])(?:file:/*|~|[A-Za-z]:)?[/\\](?:[^"']*[/\\])?""")
_OBEYED = {"Cc", "Cf", "Co", "Cn", "Cs", "Zl", "Zp"}  # in Unicode: control, format, private, unassigned, separators


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one: "1 step", "1,000 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def milliseconds(value: float) -> str:
    """Return a duration in ms with two significant digits: "4.2 µs", "0.85 ms", "8.5 ms", "85 ms"."""
    if 0 < value < 0.00995:
        return f"{value * 1e3:.{1 if value >= 0.000995 else 2}f} µs"
    decimals = 0 if value >= 9.95 else 1 if value >= 0.995 else 2
    return f"{value:,.{decimals}f} ms"


def distinct_milliseconds(one: float, other: float) -> tuple[str, str]:
    """Return two durations in ms with so many digits that different durations look different."""
    texts = milliseconds(one), milliseconds(other)
    if texts[0] != texts[1] or one == other:
        return texts
    decimals = next((count for count in range(1, 9) if round(one, count) != round(other, count)), 9)
    return f"{one:,.{decimals}f} ms", f"{other:,.{decimals}f} ms"


def digits(ratio: float) -> str:
    """Return a ratio with two decimals, a large one with fewer: "0.98", "12.3", "1,230"."""
    decimals = 2 if ratio < 9.995 else 1 if ratio < 99.95 else 0
    return f"{ratio:,.{decimals}f}"


def three_digits(value: float) -> str:
    """Return a number with three digits, or with all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rounded(value: float, count: int = 3) -> str:
    """Return a number above 0 with so many significant digits: "676,000", "12.3", "0.012"."""
    decimals = count - 1 - math.floor(math.log10(float(f"{value:.{count - 1}e}")))
    return f"{round(value, decimals):,.{max(decimals, 0)}f}"


def percent(share: float) -> str:
    """Return a share from 0 to 1 in percent: "12%", "1.2%", "< 0.1%"; "–" for NaN."""
    if math.isnan(share):
        return "–"
    if 0 < share < 0.0005:
        return "< 0.1%"
    decimals = 0 if share >= 0.0995 or share == 0 else 1
    return f"{share * 100:.{decimals}f}%"


def signed_percent(change: float) -> str:
    """Return a change as a whole number of percent with its sign: "+12%", "-3%"; "+0%" if it rounds to 0."""
    return f"{round(change * 100):+d}%" if math.isfinite(change) else f"{change:+.0%}"


def printable(name: str) -> str:
    """Return a name without the characters that a terminal would obey instead of showing; each becomes "?".

    Anyone may have written the names in a trace: escape sequences in them could clear the screen, or hide a line.
    """
    return "".join("?" if unicodedata.category(each) in _OBEYED else each for each in name)


def without_paths(text: str) -> str:
    """Return a text with only the last part of each absolute path, since a folder may name its user."""
    return re.sub(r"(?<![\w.:/\\])(?:[A-Za-z]:)?[/\\](?:[^/\\\n:'\"]+[/\\])+", "", text)


def without_folders(code: str) -> str:
    """Return code in which the paths in quotes have no folders: these may contain the user's name."""
    return _PATH.sub(r"\1…/", code)
