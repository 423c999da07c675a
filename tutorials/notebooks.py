"""The notebooks of the tutorials: made from the scripts, compared with them, executed.

python tutorials/notebooks.py              write NAME.ipynb, without outputs, for every NAME.py
python tutorials/notebooks.py --check      exit 1 if a notebook is not what its script gives, or a
                                           text has a link to nowhere or a number that no code has
python tutorials/notebooks.py --execute    run all of them, each in a fresh kernel; exit 1 if one
                                           fails or all together take longer than 8 minutes
"""

import argparse
import re
import sys
import time
from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).resolve().parent
LIMIT = 8 * 60  # seconds, for all on 2 cores
# What a text may name without an assert: formulas, `code`, links.
EXEMPT = (r"\$\$.*?\$\$", r"\$[^$]*\$", r"```.*?```", r"`[^`]*`", r"\[[^]]*\]\([^)]*\)")


def scripts():
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def notebook(script):
    """The notebook of a script; its cells have numbers as ids, so that it is always the same."""
    found = jupytext.read(script)
    found.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(found.cells):
        cell.id, cell.metadata = f"cell-{number}", nbformat.NotebookNode()
    found.nbformat, found.nbformat_minor = 4, 5
    nbformat.validate(found)
    return found


def differing():
    """The notebooks that are missing, not what their scripts give, or have no script."""
    texts = {s.with_suffix(".ipynb"): nbformat.writes(notebook(s)) + "\n" for s in scripts()}
    there = {path: path.read_text(encoding="utf-8") for path in HERE.glob("*.ipynb")}
    return {path.name for path in texts | there if texts.get(path) != there.get(path)}


def cells(script, kind):
    """The texts of a script's cells of a kind, code or markdown (without the comment signs)."""
    return [cell.source for cell in jupytext.read(script).cells if cell.cell_type == kind]


def missing_numbers(text, code):
    """The numbers of a text, with a decimal point or of three digits, that the code does not have.

    An assert beside a text holds what it says. The head and the exercises are exempt.
    """
    text = text.partition("\n\n## ")[2].partition("## Exercises")[0]
    for pattern in EXEMPT:
        text = re.sub(pattern, " ", text, flags=re.DOTALL)
    code = re.sub("[_,]", "", code)
    for number in re.findall(r"(?<![\w.,\-])\d[\d,]*(?:\.\d+)?(?![\w]|[.,]\d)", text):
        plain = number.replace(",", "")
        ways = [plain, f"{float(plain) / 100:g}"] if "." in plain else [plain]  # 0.8 % is 0.008
        if len(plain) > 2 and not any(re.search(rf"(?<![\d.]){way}(?!\d)", code) for way in ways):
            yield number


def dead_links(text, path):
    """The links of a text at `path` to a file or a heading of the project that is not there."""
    for link in map("".join, re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)):
        if re.match("https?:|mailto:", link):
            continue
        file, _, heading = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            yield link
        elif heading:
            titles = re.findall("^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
            if heading not in [title.replace(" ", "-") for title in plain]:
                yield link


def faults(script):
    """What is wrong with the text of a tutorial."""
    text, code = ("\n\n".join(cells(script, kind)) for kind in ("markdown", "code"))
    yield from (f"{script.stem}: a dead link, {link}" for link in dead_links(text, script))
    yield from (f"{script.stem}: no code has {number}" for number in missing_numbers(text, code))


def check():
    """Say what is wrong; returns whether anything is."""
    found = [f"{name} is not what its script gives: run notebooks.py" for name in differing()]
    found += [fault for script in scripts() for fault in faults(script)]
    print(*found, sep="\n", end="\n" * bool(found))
    return bool(found)


def execute(script):
    """Run a tutorial as a notebook in this folder; returns the seconds it took, or raises."""
    from nbclient import NotebookClient

    began = time.perf_counter()
    where = {"metadata": {"path": str(HERE)}}
    NotebookClient(
        notebook(script), timeout=LIMIT, kernel_name="python3", resources=where
    ).execute()
    return time.perf_counter() - began


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="which, as 04 (default: all)")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--execute", action="store_true")
    args = parser.parse_args(argv)
    chosen = [s for s in scripts() if s.stem.startswith(tuple(args.names) or "")]
    if not chosen:
        print(f"no tutorial begins with {' or '.join(args.names)}", file=sys.stderr)
        return 2
    if args.check:
        return check()
    if args.execute:
        total = 0.0
        for script in chosen:
            total += (seconds := execute(script))
            print(f"{script.stem}: {seconds:.0f} s", flush=True)
        print(f"together {total:.0f} s")
        return total > LIMIT
    for script in chosen:
        text = nbformat.writes(notebook(script)) + "\n"
        script.with_suffix(".ipynb").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
