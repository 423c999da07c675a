"""Evaluate a checkpoint on tasks of EleutherAI's lm-evaluation-harness (pip install lm_eval).

    python tutorials/harness.py                                           the newest run, ten tasks
    python tutorials/harness.py --tasks lambada_openai piqa --limit 100   by name, from the hub
    python tutorials/harness.py --tasks my_task --include_path folder/    folder/my_task.yaml

The harness asks a model for three things: how probable a continuation is after a context, how
probable a whole text is, and what the model writes. `Adapter` answers with the probabilities of
`model.log_probs`: renormalised over the real tokens and calibrated by τ.
"""

import argparse
import difflib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import sys
import time
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where mhf.py is
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError:  # the rest of this file, --help for example, does without
    TemplateLM = object

PAPER = (
    "lambada_openai hellaswag piqa arc_easy arc_challenge winogrande openbookqa boolq record sciq"
)


# What the model is asked, in token ids


def score(model, pairs):
    """Pairs (context, continuation) of token ids -> for each the continuation's log P and whether
    greedy decoding would write it.

    A context that is too long loses its beginning. Greedy is the token with the highest score; of
    tokens with equal scores, as those that share a signature have, the one with the lowest id. It
    is found among the scores as they are, which no rounding of a log probability can make equal.
    """
    import torch

    window, config = model.config.max_position_embeddings, model.config
    rows = [[*context, *continuation][-window - 1 :] for context, continuation in pairs]
    lengths = [len(continuation) for _, continuation in pairs]
    T, device = max(map(len, rows)) - 1, model.model.embed_tokens.weight.device
    ids = [row[:-1] + [0] * (T + 1 - len(row)) for row in rows]  # padding is behind all that counts
    targets = [i for row, length in zip(rows, lengths) for i in row[-length:]]
    wanted = [
        n * T + t
        for n, (row, length) in enumerate(zip(rows, lengths))
        for t in range(len(row) - 1 - length, len(row) - 1)
    ]
    ids, targets, wanted = (torch.tensor(x, device=device) for x in (ids, targets, wanted))
    size = max(1, 2**25 // max(config.vocab_size, len(model.model.embed_tokens.weight)))
    log_p, greedy = [], []
    with torch.inference_mode():
        h = model(ids).flatten(0, 1)[wanted]  # (M, D), M tokens of continuations
        for states, target in zip(h.split(size), targets.split(size)):
            scores = model.token_scores(states)  # (size, V)
            greedy.append(scores.argmax(-1) == target)  # (size,); the first of equal ones
            log_probs = (scores / config.calibration).log_softmax(-1)  # (size, V)
            log_p.append(log_probs.gather(-1, target.unsqueeze(-1))[:, 0])  # (size,)
    sums = [part.double().sum().item() for part in torch.cat(log_p).cpu().split(lengths)]
    return list(zip(sums, [part.all().item() for part in torch.cat(greedy).split(lengths)]))


def text_of(tokenizer, ids):
    """What ids add to a text; `decode` is for whole texts, whose first blank may be left out."""
    return b"".join(tokenizer.token_bytes(i) or b"" for i in ids).decode("utf-8", "replace")


def write(model, tokenizer, prompts, until, max_new_tokens, sampling):
    """Continue prompts (lists of token ids) -> texts, each cut where a stop string begins.

    A text ends with the token that completes a string of `until`, at end-of-text, or after
    max_new_tokens. sampling: temperature, top_k, top_p.
    """
    rows, texts = [[] for _ in prompts], [None] * len(prompts)
    for new in model.generate(prompts, max_new_tokens, *sampling, stop=tokenizer.eot):
        for n, token in enumerate(new.tolist()):
            if texts[n] is not None:
                continue
            rows[n] += [token] if token != tokenizer.eot else []
            text = text_of(tokenizer, rows[n])
            starts = [text.find(stop) for stop in until if stop in text]
            if starts or token == tokenizer.eot:
                texts[n] = text[: min(starts, default=None)]
        if None not in texts:
            break
    return [text_of(tokenizer, row) if text is None else text for row, text in zip(rows, texts)]


def generation_settings(wanted):
    """A task's generation_kwargs -> (until, max_new_tokens, (temperature, top_k, top_p))."""
    wanted = dict(wanted)
    until = wanted.pop("until", None) or ()
    until = tuple(filter(None, [until] if isinstance(until, str) else until))
    limits = [wanted.pop(name, None) for name in ("max_gen_toks", "max_new_tokens")]
    sample, temperature = wanted.pop("do_sample", None), wanted.pop("temperature", None)
    top_k, top_p = wanted.pop("top_k", None) or None, wanted.pop("top_p", None)
    if wanted:
        raise ValueError(
            f"generation_kwargs {', '.join(map(str, wanted))}: only until, max_gen_toks, "
            "do_sample, temperature, top_k and top_p are implemented; take them out of the task"
        )
    if sample is None:  # the harness's rule: a temperature asks for sampling
        sample = bool(temperature)
    temperature = (1.0 if temperature is None else float(temperature)) if sample else 0.0
    return until, int(next((n for n in limits if n is not None), 256)), (temperature, top_k, top_p)


class Adapter(TemplateLM):
    """A model of this project as the harness wants one: lm_eval.simple_evaluate(Adapter(…), …).

    TemplateLM's part: it encodes context and continuation together and cuts the ids where those of
    the context end, after it moved blanks at the context's end to the continuation; an empty
    context is the end-of-text token. Raises ValueError for what cannot be scored.
    """

    def __init__(self, model, tokenizer, batch_size=8):
        super().__init__()
        self.model, self.words, self.batch_size = model, tokenizer, batch_size
        self.window = model.config.max_position_embeddings
        self.asked = self.shortened = 0  # requests and windows; those whose context was too long

    @property
    def eot_token_id(self):
        return self.words.eot

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.words.encode(string)

    def in_batches(self, work, rows):
        """work(numbers of some rows) for batches of rows, the longest first; results in order."""
        order, results = sorted(range(len(rows)), key=lambda i: -len(rows[i])), {}
        for start in tqdm(range(0, len(order), self.batch_size), "batches", disable=None):
            batch = order[start : start + self.batch_size]
            results |= zip(batch, work(batch))
        return [results[i] for i in range(len(rows))]

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        pairs = [(context or [self.words.eot], target) for _, context, target in requests]
        for (strings, *_), (context, target) in zip(requests, pairs):
            if not target:
                raise ValueError(f"no token is left for the continuation in {strings!r:.200}")
            if len(target) > self.window:
                raise ValueError(
                    f"a continuation of {len(target)} tokens is longer than the model's "
                    f"max_position_embeddings {self.window}"
                )
            self.shortened += len(context) + len(target) > self.window + 1
        self.asked += len(pairs)
        rows = [[*context, *target] for context, target in pairs]
        return self.in_batches(lambda batch: score(self.model, [pairs[i] for i in batch]), rows)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """log P of whole texts: each token once, in windows that start with end-of-text or go on
        with the last tokens of the window before."""
        windows, owners = [], []
        for n, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.words.eot, self.window, 1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(n)
        totals = [0.0] * len(requests)
        for n, (log_p, _) in zip(owners, self._loglikelihood_tokens(windows)):
            totals[n] += log_p
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """Texts. A context keeps room for the text, but loses no more than the older half of the
        model's window; a text that outgrows the window goes on from its newest half."""
        groups, texts = {}, {}
        for i, request in enumerate(requests):
            groups.setdefault(generation_settings(request.args[1]), []).append(i)
        self.asked += len(requests)
        for (until, limit, sampling), members in groups.items():
            room = max(1, self.window // 2, self.window - limit)
            whole = [self.tok_encode(requests[i].args[0]) or [self.words.eot] for i in members]
            prompts = [ids[-room:] for ids in whole]
            self.shortened += sum(len(ids) > room for ids in whole)
            how = until, limit, sampling

            def work(batch, prompts=prompts, how=how):
                return write(self.model, self.words, [prompts[i] for i in batch], *how)

            texts |= zip(members, self.in_batches(work, prompts))
        return [texts[i] for i in range(len(requests))]


# The command


def parse_arguments(argv):
    """The command line. A mistake that shows without the checkpoint ends the program here."""
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser("harness.py", argparse.SUPPRESS, __doc__, **how)
    add = parser.add_argument
    last = max(Path("runs").glob("*/last"), key=os.path.getmtime, default=None)
    add("--checkpoint", default=last and last.parent, help="folder or hub name (default: newest)")
    add("--revision", help="branch, tag or commit of a Hugging Face hub checkpoint")
    add("--tokenizer", help="file, folder, hub or tiktoken name (default: the checkpoint's)")
    add("--tasks", nargs="+", default=["paper"], help=f"names; paper (default) is {PAPER}")
    add("--include_path", help="folder with tasks of your own, YAML files")
    add("--calibration", default="fitted", help="fitted (default): as stored; 1: the paper; or τ")
    add("--limit", type=float, help="examples of each task; below 1: their share (default: all)")
    add("--num_fewshot", type=int, help="examples in the context (default: the task's own number)")
    add("--batch_size", type=int, default=8, help="requests at a time (default 8)")
    add("--seed", type=int, help="of all that is random (default: the harness's own seeds)")
    add("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")
    add("--output", help="write the results, and how they came about, to this JSON file")
    args = parser.parse_args(argv)
    args.flags = sys.argv[1:] if argv is None else argv
    for name, least in (("num_fewshot", 0), ("batch_size", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and not least <= value < 2**32:
            parser.error(f"--{name} must be from {least} to {2**32 - 1}, not {value}")
    if args.limit is not None and not (0 < args.limit < 1 or args.limit % 1 == 0 < args.limit):
        parser.error(f"--limit is a whole number from 1, or a share below 1, not {args.limit:g}")
    try:
        args.tau = None if args.calibration == "fitted" else float(args.calibration)
        valid = args.tau is None or 0 < args.tau < math.inf
    except ValueError:
        valid = False
    if not valid:
        parser.error(f"--calibration is fitted or a positive number, not {args.calibration}")
    if args.checkpoint is None:
        parser.error("there is no checkpoint under runs/ yet: run `python train.py` first")
    if args.revision and Path(args.checkpoint).exists():
        parser.error(f"--revision {args.revision} goes with a hub name, not with a folder")
    if args.include_path and not Path(args.include_path).is_dir():
        parser.error(f"--include_path: there is no folder {args.include_path}")
    if args.output and (Path(args.output).is_dir() or not Path(args.output).parent.is_dir()):
        parser.error(f"--output {args.output} must name a file, in a folder that exists")
    if TemplateLM is object:
        parser.error("the evaluation harness is not installed: pip install lm_eval")
    return args


def open_checkpoint(args):
    """(model, tokenizer); args.checkpoint and args.device become what was found."""
    import mhf

    args.device, _ = mhf.choose_device(args.device)
    args.checkpoint = mhf.find_checkpoint(args.checkpoint, args.revision)
    if not (source := args.tokenizer or mhf.tokenizer_file(args.checkpoint)):
        raise ValueError(f"{args.checkpoint} has no tokenizer: name one with --tokenizer")
    model = mhf.load(args.checkpoint).to(args.device).requires_grad_(False)
    tokenizer = mhf.open_tokenizer(source)
    mhf.adopt_tokenizer(model, tokenizer)
    model.config.calibration = args.tau or model.config.calibration
    return model, tokenizer


def find_tasks(args):
    """(task manager, names of tasks, in which * and ? stand for others); ValueError if unknown."""
    from lm_eval.tasks import TaskManager

    manager, tasks = TaskManager(include_path=args.include_path), {}
    for name in " ".join(PAPER if name == "paper" else name for name in args.tasks).split():
        if not (found := manager.match_tasks([name])):
            like = difflib.get_close_matches(name, manager.all_tasks, 3) or ["none like it"]
            raise ValueError(
                f"unknown task {name}; the harness knows {', '.join(like)}; a task of your own "
                "needs --include_path with its folder"
            )
        tasks |= dict.fromkeys(found)
    return manager, [*tasks]


def evaluate(lm, manager, tasks, args):
    """The harness's dict of results. ValueError if tasks or data fail before the first request."""
    import lm_eval

    kinds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    seeds = {} if args.seed is None else dict.fromkeys(kinds, args.seed)
    how = dict(num_fewshot=args.num_fewshot, limit=args.limit, batch_size=args.batch_size) | seeds
    try:
        return lm_eval.simple_evaluate(
            lm, tasks=tasks, task_manager=manager, log_samples=False, device=str(args.device), **how
        )
    except Exception as error:
        if lm.asked:
            raise
        remedy = "mend the task's file"
        if isinstance(error, OSError):
            remedy = "named tasks need a network for their data, your own the data_files they name"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"tasks {', '.join(tasks)}: {reason:.300}; {remedy}") from error


def report(lm, results, args):
    """What --output holds: the harness's numbers, and how they came about."""
    import torch

    names = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better", "config")
    packages = ("lm_eval", "datasets", "torch", "mmh3", "tiktoken", "numpy")
    cuda = args.device.type == "cuda"
    machine = {"system": platform.platform(), "cores": os.cpu_count()}
    machine["device"] = torch.cuda.get_device_name() if cuda else str(args.device)
    return {name: results[name] for name in names if name in results} | {
        "command": shlex.join(["python", "tutorials/harness.py", *args.flags]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "checkpoint": str(args.checkpoint),
        "model": json.loads(lm.model.config.to_json()),
        "calibration": {"asked": args.calibration, "used": lm.model.config.calibration},
        "requests": {"all": lm.asked, "with shortened context": lm.shortened},
        "machine": machine,
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }


def run(args):
    """Print what was loaded, the harness's table, and how many contexts were too long."""
    model, tokenizer = open_checkpoint(args)
    config, limit = model.config, f", limit {args.limit:g}" if args.limit else ""
    about = f"calibration τ {config.calibration:g}, context {config.max_position_embeddings} tokens"
    print(f"{args.checkpoint}: {about}, device {args.device}{limit}", flush=True)
    manager, tasks = find_tasks(args)
    lm = Adapter(model, tokenizer, args.batch_size)
    results = evaluate(lm, manager, tasks, args)
    for column in ("results", "groups"):
        if results.get(column):
            print(make_table(results, column))
    if lm.shortened:
        print(f"{lm.shortened} of {lm.asked} requests lost the beginning of a too long context")
    if args.output:
        text = json.dumps(report(lm, results, args), indent=2, default=str) + "\n"
        Path(args.output).write_text(text, encoding="utf-8")


def main(argv=None):
    """Return the exit status: 0, 2 for a mistake in the call, 130 for Ctrl-C."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # whatever the terminal says
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        run(parse_arguments(argv))
    except ValueError as error:
        print(f"harness.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
