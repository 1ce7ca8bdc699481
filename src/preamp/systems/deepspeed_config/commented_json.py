"""Read JSON as people write configurations: with comments, and a comma after the last entry.

Errors give line and column. A key that is given twice is an error.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from preamp.errors import ConfigError

# A string or comment may lack its end: then it matches too, or the search would start again at every place.
TEXT = r'("(?:\\.|[^"\\\n])*"?)'
COMMENT = re.compile(TEXT + r"|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
LAST_COMMA = re.compile(TEXT + r"|(?<=[\"}\]\w])\s*,(?=\s*[}\]])")


def read(path: Path) -> Any:
    """Return the content of a JSON file. Comments are `//`, `#` and `/* */`, as DeepSpeed allows them.

    Raises:
        ConfigError: for a file that is not such JSON, with line and column, and for a key given twice.
        OSError: for a file that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        for pattern in (COMMENT, LAST_COMMA):
            text = pattern.sub(_blank, text)
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{place}: {error.msg}. Write JSON, with comments if you like.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start} is not UTF-8 text. Write the file in UTF-8.") from None
    except RecursionError:
        raise ConfigError("sections are nested too deep to be a configuration. Write fewer levels.") from None
    except ConfigError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"a number cannot be read: {error}. Write a shorter one.") from None


def _blank(match: re.Match[str]) -> str:
    """Return strings unchanged and anything else as spaces, so that positions stay right."""
    endless = match[0].startswith("/*") and (len(match[0]) < len("/**/") or not match[0].endswith("*/"))
    return match[0] if match[1] or endless else re.sub(r"[^\n]", " ", match[0])


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section = dict(pairs)
    if len(section) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        values = ", then ".join(json.dumps(value) for name, value in pairs if name == twice)
        raise ConfigError(f'"{twice}" is given twice: {values}. Write it once.')
    return section
