"""Sample from a trained model: stream its text, or --explain how it came to every token."""

import argparse
import codecs
import os
import sys
import time
from pathlib import Path
from unicodedata import east_asian_width

SIGNS = {i: 0x2400 + i for i in range(32)} | {ord(" "): "␣", ord("\n"): "↵"}
IDS = "this checkpoint has no tokenizer (--tokenizer names one), so prompt and text are token ids"
LEGEND = (
    "P: calibrated; mass: P of all tokens in the id's bucket; after it the most probable buckets\n"
)


def parse_arguments(argv):
    """The command line. A mistake that shows without the checkpoint ends the program here."""
    parser = argparse.ArgumentParser("sample.py", argparse.SUPPRESS, __doc__, allow_abbrev=False)
    add, cores = parser.add_argument, range(1, (os.cpu_count() or 1) + 1)
    last = max(Path("runs").glob("*/last"), key=os.path.getmtime, default=None)
    add("--checkpoint", default=last and last.parent, help="folder or hub name (default: newest)")
    add("--revision", help="branch, tag or commit of a Hugging Face hub checkpoint")
    add("--tokenizer", help="file, folder, hub or tiktoken name (default: the checkpoint's)")
    add("--prompt", help="text to continue (default: a newline); - reads standard input")
    add("--num_samples", type=int, default=1, help="sample i uses seed + i (default 1)")
    add("--max_new_tokens", type=int, default=200, help="tokens in a sample (default 200)")
    add("--seed", type=int, default=0, help="same seed, same machine, same text (default 0)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    add("--top_k", type=int, help="sample among the k most probable tokens (default: all)")
    add("--top_p", type=float, help="sample among the fewest tokens of mass p (default: all)")
    add("--stop_at_eot", action=argparse.BooleanOptionalAction, default=True, help="default: on")
    add("--explain", action="store_true", help="print how each token was predicted, not the text")
    add("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")
    add("--threads", type=int, choices=cores, metavar="N", help="CPU threads")
    args = parser.parse_args(argv)
    for name, least in (("num_samples", 1), ("max_new_tokens", 1), ("seed", 0)):
        if not least <= getattr(args, name) < 2**62:
            parser.error(f"--{name} must be from {least} to {2**62 - 1}, not {getattr(args, name)}")
    if args.checkpoint is None:
        parser.error("there is no checkpoint under runs/ yet: run `python train.py` first")
    if args.revision and Path(args.checkpoint).exists():
        parser.error(f"--revision {args.revision} goes with a hub name, not with a folder")
    return args


def load_checkpoint(args):
    """(model, tokenizer or None); args.checkpoint and args.device become what was found."""
    import torch  # imported here, like mhf, so that --help answers at once

    import mhf

    args.device, _ = mhf.choose_device(args.device)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    args.checkpoint = mhf.find_checkpoint(args.checkpoint, args.revision)
    model = mhf.load(args.checkpoint).to(args.device).requires_grad_(False)
    source = args.tokenizer or mhf.tokenizer_file(args.checkpoint)
    tokenizer = mhf.open_tokenizer(source) if source else None
    if tokenizer:
        mhf.adopt_tokenizer(model, tokenizer)
    return model, tokenizer


def encode_prompt(prompt, tokenizer):
    """(text, token ids) of a prompt, which "-" takes from standard input."""
    try:
        text = (sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)).decode("utf-8")
        return text, tokenizer.encode(text) if tokenizer else [int(word) for word in text.split()]
    except ValueError as error:
        raise ValueError(f"{'prompts are UTF-8 text' if tokenizer else IDS}: {error}") from None


def visible(raw, limit):
    """Token bytes as text of `limit` columns, with a sign for blanks and control characters."""
    text = raw.decode("utf-8", errors="backslashreplace")
    text = text.translate({ord(c): f"\\u{ord(c):04x}" for c in text if not c.isprintable()} | SIGNS)
    while (over := sum(1 + (east_asian_width(c) in "WF") for c in text) - limit) > 0:
        text = text[:-2] + "…"
    return text + " " * -over


def explain(model, context, token, names):
    """Lines (at most 100 columns) that say how `token` was predicted after `context`."""
    found = model.explain(context, top_k=min(5, model.config.vocab_size))
    ids = next(model.parameters()).new_tensor([context]).long()  # (1, T)
    scores = model.token_scores(model(ids)[:, -1])[0]  # (V,)
    p = (scores / model.config.calibration).softmax(-1)  # (V,)
    mass = f"  valid mass {found['valid_mass']:.3g}" if "valid_mass" in found else ""
    yield f"{visible(names[token], 30)}  id {token:<8}  P {p[token]:.4f}{mass}"
    for j, step in enumerate(found.get("functions", ())):
        own = model.signatures.ids[token, j].item()
        mass = p[model.model.hash_map[:, j] == own].sum()
        cells = [f"{b['bucket']:>8}{'* '[b['bucket'] != own]}{b['prob']:.4f}" for b in step["top"]]
        yield f"  function {j:<2} id {own:<5} mass {mass:.4f} " + "".join(cells[:4])
    others = [t["id"] for t in found["top_tokens"] if t["id"] != token][:4]
    cells = [f" {visible(names[i], 12)} {p[i]:.4f}" for i in others]
    yield "  runners-up        " + "".join(cells)


def run(args):
    """Print the samples; on standard error, first what was loaded and at last how fast it went."""
    model, tokenizer = load_checkpoint(args)
    config, size = model.config, model.num_parameters()["total"]
    default = "\n" if tokenizer else f"{config.pad_token_id or 0}"
    text, ids = encode_prompt(default if args.prompt is None else args.prompt, tokenizer)
    window, V = config.max_position_embeddings, config.vocab_size
    end = tokenizer.eot if tokenizer else config.pad_token_id
    stop = {end} if args.stop_at_eot and end is not None else ()
    settings = args.max_new_tokens, args.temperature, args.top_k, args.top_p, stop
    model.generate(ids, *settings)  # raises its ValueErrors now, before the first line
    about = f"{size:,} parameters, calibration τ {config.calibration:g}, device {args.device}"
    notes = [f"{args.checkpoint}: {about}"] + ([] if tokenizer else [IDS])
    if len(ids) > window:
        kept = "the newest half of the context is kept"
        notes.append(f"the prompt has {len(ids)} tokens, the context only {window}: {kept}")
    print(*notes, sep="\n", file=sys.stderr)
    known = map(tokenizer.token_bytes, range(V)) if tokenizer else (b" %d" % i for i in range(V))
    added = getattr(getattr(model, "signatures", None), "tokens", [None] * V)  # by expand, too
    names = [name or added[i] or b"<%d>" % i for i, name in enumerate(known)]
    start, count, opening = time.perf_counter(), 0, LEGEND if args.explain else text
    for i in range(args.num_samples):
        decoder, context = codecs.getincrementaldecoder("utf-8")("replace"), ids
        print(("-" * 40 + "\n") * (i > 0) + opening, end="", flush=True)
        for token in model.generate(ids, *settings, args.seed + i):
            context = context if len(context) <= window else context[-max(1, window // 2) :]
            if args.explain:
                print(*explain(model, context, token, names), sep="\n", flush=True)
            elif token not in stop:
                print(decoder.decode(names[token]), end="", flush=True)
            context, count = [*context, token], count + 1
        print(decoder.decode(b"", final=True), flush=True)
    print(f"{count} tokens, {count / (time.perf_counter() - start):.1f} tok/s", file=sys.stderr)


def main(argv=None):
    """Return the exit status: 0, 2 for a mistake in the call, 130 for Ctrl-C."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # whatever the terminal says
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        try:
            run(parse_arguments(argv))
        finally:
            print(end="", flush=True)
    except ValueError as error:
        print(f"sample.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for example, has enough; nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
