"""The table of packages in docs/architecture.md, from the first lines of their modules.

python -m tools.packages [PACKAGE]    prints that table, or the modules of a package with what each is for
`python -m tools.config_docs` writes the table into the page.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import forge
from forge.core.errors import ConfigError

FORGE = Path(forge.__file__).parent
PAGE = Path("docs/architecture.md")
ORDER = re.compile(r"^\w+(?: < \w+)+$", re.MULTILINE)  # the order of imports, as the page shows it


def table(page: str) -> str:
    """Rows of packages, what each is for, and its modules, in the order that the page names. Raises
    ConfigError for a page without it, or with another package than there are."""
    found = ORDER.search(page)
    names = found[0].split(" < ") if found else []
    there = {path.parent.name for path in FORGE.glob("*/__init__.py")} - {"plugins"}
    if set(names) != there:
        odd = ", ".join(sorted(there ^ {*names}))
        raise ConfigError(
            f"{PAGE} and forge/ do not have the same packages: {odd}",
            fix=f"put all of them into the line with ` < ` of {PAGE}, as in tests/unit/test_imports.py",
        )
    rows = (
        f"| `{name}` | {purpose(FORGE / name / '__init__.py')} | {', '.join(_names(name))} |"
        for name in names
    )
    return "\n".join(["| package | what for | modules |", "|---|---|---|", *rows])


def purpose(module: Path) -> str:
    """First sentence of a module's docstring, in one line."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    first, _, _ = text.partition("\n\n")
    return re.split(r"(?<=[.?]) (?=[A-Z])", " ".join(first.split()))[0]


def _names(package: str) -> Iterator[str]:
    for path in modules(package):
        yield f"`{path.relative_to(FORGE / package).with_suffix('')}`"


def modules(package: str) -> list[Path]:
    """Modules of a package, or of plugins/NAME."""
    return [path for path in sorted((FORGE / package).rglob("*.py")) if path.stem != "__init__"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.packages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("package", nargs="?", help="such as launch, or plugins/pages")
    package = parser.parse_args(arguments).package
    if package is None:
        print(table((FORGE.parent / PAGE).read_text()))
        return 0
    if not (FORGE / package / "__init__.py").is_file():
        parser.error(f"forge/{package} is no package")
    for path in modules(package):
        print(f"{path.relative_to(FORGE / package)!s:28} {purpose(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
