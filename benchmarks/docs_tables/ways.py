"""docs/on_*.md: what the plans of five people's pages print."""

from collections.abc import Callable

from docs_tables.markdown import results


def answers() -> dict[str, dict[str, Callable[[], str]]]:
    """The outputs of each page's plans, by page and marker."""
    pages: dict[str, dict[str, Callable[[], str]]] = {}
    for row in (row for row in results("ways")["rows"] if row["page"] != "README.md"):
        page = pages.setdefault(f"docs/{row['page']}", {})
        page[f"answer {len(page) + 1}"] = lambda output=row["output"]: f"```text\n{output.rstrip()}\n```"
    return pages
