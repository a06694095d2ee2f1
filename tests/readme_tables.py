"""Tables of README.md from the files in results/: `PYTHONPATH=. python tests/readme_tables.py` writes them anew.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.outputs import markdown_table

ROOT = Path(__file__).parents[1]


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _with_interval(value: float, half_width: float, sign: str = "") -> str:
    return f"{value:{sign}.3f} ± {half_width:.3f}"


def demo_table() -> str:
    """The demo runs of results/demo, one row each."""
    rows = []
    for path in sorted((ROOT / "results" / "demo").glob("*.json")):
        run = _read(path)
        rows.append(
            {
                "run": path.stem.replace("_", " "),
                "accuracy before": _with_interval(run["accuracy_before"], run["accuracy_ci95_before"]),
                "after": _with_interval(run["accuracy_after"], run["accuracy_ci95_after"]),
                "gain": _with_interval(run["accuracy_gain"], run["accuracy_gain_ci95"], "+"),
                "acceptance length": run["acceptance_length"],
                "entropy": run["entropy"],
                "same tokens": run.get("tokens_equal"),
                "same parameters": run.get("params_equal"),
            }
        )
    return markdown_table(rows)


TABLES: dict[str, Callable[[], str]] = {"demo": demo_table}


def with_tables(text: str) -> str:
    """`text` with every table made anew.

    Raises:
        KeyError: a table has a name that is not in TABLES.
    """

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end of table -->)", table, text, flags=re.S)


def main() -> None:
    """Rewrite the tables of README.md."""
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
