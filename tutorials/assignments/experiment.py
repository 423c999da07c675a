"""Train a student's model and the unchanged one, with the same flags and seed, and compare them.

The four assignments share this file; there is nothing to write here. Importing it lets Python
find mhf.py and train.py, two folders up.
"""

import shutil
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mhf  # noqa: E402
import train  # noqa: E402

# Small on purpose: half as many rows as tokens, a third of the steps of train.py's own default.
DEFAULTS = "--preset tiny --tokenizer bpe:4096 --num_buckets 512 --steps 150 --eval_every 150"
NOT_HERE = ("model", "resume", "compare", "prepare", "stop_after")


def train_both(file, changes, argv=None):
    """Train the changed model, then the unchanged one, and compare the runs; returns the status.

    file: the student's. changes: {name in mhf: what replaces it while the changed model is built
    and trained}. argv: flags of train.py (default: the command line's); they win over DEFAULTS.
    """
    name = Path(file).stem
    argv = [*DEFAULTS.split(), *(sys.argv[1:] if argv is None else argv)]
    given = train.parse(argv)
    for flag in NOT_HERE:
        if flag in given:
            message = f"--{flag} is not for this script, which trains two models; use train.py"
            print(f"{name}.py: {message}", file=sys.stderr)
            return 2
    out, stem = Path(given.get("out", "runs")), given.get("name", time.strftime("%Y%m%d-%H%M%S"))
    changed, unchanged = out / f"{stem}-{name}", out / f"{stem}-unchanged"
    for run, parts in ((changed, changes), (unchanged, {p: getattr(mhf, p) for p in changes})):
        print(f"\n=== {run.name} ===")
        try:
            with mock.patch.multiple(mhf, **parts):
                status = train.main([*argv, "--name", run.name])
        except NotImplementedError as error:
            print(f"{name}.py: {error}", file=sys.stderr)
            return 2
        if status:
            return status
    shutil.copy(file, changed)  # beside the mhf.py that train.py keeps there
    print(f"\n=== held-out text at the end, seed {train.split_flags(given)[0].seed} ===")
    return train.main(["--compare", str(unchanged), str(changed)])
