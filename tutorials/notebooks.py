"""The notebooks of the tutorials: made from the scripts, compared with them, executed.

python tutorials/notebooks.py              write NAME.ipynb, without outputs, for every NAME.py
python tutorials/notebooks.py --check      exit 1 if a notebook is not what its script gives
python tutorials/notebooks.py --execute    run all of them, each in a fresh kernel; exit 1 if one
                                           fails or all together take longer than 8 minutes
"""

import argparse
import sys
import time
from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).resolve().parent
LIMIT = 8 * 60  # seconds, for all on 2 cores


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


def execute(script):
    """Run a tutorial as a notebook in this folder; returns the seconds it took, or raises."""
    from nbclient import NotebookClient

    began = time.perf_counter()
    where = {"metadata": {"path": str(HERE)}}
    NotebookClient(
        notebook(script), timeout=LIMIT, kernel_name="python3", resources=where
    ).execute()
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="which, as 04 (default: all)")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--execute", action="store_true")
    args = parser.parse_args()
    chosen = [s for s in scripts() if s.stem.startswith(tuple(args.names) or "")]
    if not chosen:
        print(f"no tutorial begins with {' or '.join(args.names)}", file=sys.stderr)
        return 2
    if args.check:
        if wrong := differing():
            print(f"run `python tutorials/notebooks.py`: not in step are {', '.join(wrong)}")
        return bool(wrong)
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
