"""Everything behind one prediction, as a dict that json can write: for sample.py and the demo."""

import torch

import mhf


@torch.no_grad()
def explain(model, ids, position=-1, top_k=10, force=None, only=None):
    """What a model makes of the token at a position of one sequence, and what it expects next.

    force = {function, from 0: bucket} asks "what if": the bucket's row takes the place of the soft
    embedding. only = {function: bucket}: the probability under the condition that it is in them.
    Lists hold up to top_k entries, best first, of equals the lowest id. None: not existing here.

    tokens       of every input token: id, text, signature; gate, the weight of each row
    input        the H rows of its signature; mixed, their weighted sum; x, its vector; h, the state
    top_tokens   the most probable next tokens: id, text, signature, rank; log_p of each function;
                 score, their sum; joint_prob, its exponential; log_prob_paper, renormalised over
                 the vocabulary; log_prob, renormalised and calibrated, and log_prob_before, the
                 same without force and only; left, how many tokens share its first 1 ... H ids
    next         the same of the token that follows in ids
    signature    of the token: functions, its buckets; tries for its last id
    functions    of each: top buckets with prob; paths, the buckets of the top tokens with prob;
                 entropy_bits; forced
    valid_mass   the probability of all signatures that tokens have
    scores       of all tokens; None for ids that are never used, or left out by `only`
    total_variation  from the distribution without force and only
    Each bucket has num_tokens, the best tokens, and mass, their renormalised probability. Raises
    ValueError for arguments out of range.
    """
    ids, position, force, only = check(model, ids, position, top_k, force, only)
    h = model(ids)[0, position]  # (D,)
    log_p, scores = predict(model, h, force, only)
    plain = predict(model, h)[1] if force or only else scores
    found = explain_next(model, ids, position, top_k, scores, plain, log_p)
    rows, x, gate = embed(model, ids)
    for entry, weights in zip(found["tokens"], gate if gate is not None else [None] * ids.shape[1]):
        entry["gate"] = None if weights is None else weights.tolist()
    mixed = None if gate is None else (gate[position] @ rows[position]).tolist()
    found["input"] = {"rows": rows[position].tolist(), "mixed": mixed, "x": x[position].tolist()}
    found["input"]["h"] = h.tolist()
    if log_p is not None:
        signature = model.signatures.signatures[ids[0, position]]
        buckets = [bucket_entry(model, plain, top_k, j, b) for j, b in enumerate(signature)]
        tries = explain_tries(model, ids[0, position].item())
        found["signature"] = {"functions": buckets, "tries": tries}
        found["functions"] = explain_functions(model, log_p, plain, found["top_tokens"], top_k)
        for j, function in enumerate(found["functions"]):
            function["forced"] = force.get(j, only.get(j))
        found["valid_mass"] = plain[list(model.signatures.owner.values())].exp().sum().item()
    return found


def check(model, ids, position, top_k, force, only):
    """The arguments of explain as ids (1, T), a position from 0 on and dicts; else ValueError."""
    V, B, H = model.config.vocab_size, model.config.num_buckets, model.config.num_hashes
    H, force, only = 0 if model.config.model == "standard" else H, force or {}, only or {}
    ids = torch.atleast_2d(torch.as_tensor(ids, device=model.device))  # (1, T)
    if len(ids) > 1:
        raise ValueError(f"one sequence is explained at a time, not {len(ids)}")
    if position not in range(-ids.shape[1], ids.shape[1]):
        raise ValueError(f"position {position} is outside the {ids.shape[1]} tokens")
    if top_k not in range(1, V + 1):
        raise ValueError(f"top_k must be from 1 to {V}, not {top_k}")
    for j, bucket in [*force.items(), *only.items()]:
        if j not in range(H) or bucket not in range(B):
            raise ValueError(f"force {j}: {bucket} is outside the {H} functions of {B} buckets")
    return ids, int(position) % ids.shape[1], force, only


def predict(model, h, force=(), only=()):
    """What follows a state h (D,): log p_j of all buckets (H, B), the scores of all tokens (V,)."""
    if model.config.model == "standard":
        return None, model.token_scores(h)  # (V,)
    logits = [o for o, _ in model.hash_head.steps(h, model.table, force)]
    log_p = torch.stack(logits).float().log_softmax(-1)  # (H, B)
    scores = model.sum_over_signatures(log_p.view(-1, 1))[:, 0]  # (V,)
    for j in only:
        scores = scores.masked_fill(model.model.hash_map[:, j] != only[j], -torch.inf)
    if not scores.isfinite().any():
        raise ValueError(f"no token is in the buckets {only}")
    return log_p, scores


def embed(model, ids):
    """The rows of the table (T, H, D), the input vectors (T, D) and the gate (T, H) or None."""
    if model.config.model == "standard":
        x = model.embed(ids)[0]  # (T, D)
        return x.unsqueeze(1), x, None
    rows = model.model.embed_tokens(model.rows[ids])[0]  # (T, H, D)
    x, gate = model.embed(ids, return_gate=True)
    fits = gate is not None and gate.shape[1:] == rows.shape[:2]  # else a gate of another kind
    return rows, x[0], gate[0] if fits else None


def best_first(values, top_k=None):
    """Indices of the largest values (n,). The sort is stable: of equals the lowest comes first."""
    return values.argsort(descending=True, stable=True)[:top_k]


def token_entry(model, token_id):
    if not (table := getattr(model, "signatures", None)):
        return {"id": token_id, "text": None, "signature": None}
    raw = table.tokens[token_id]
    text = None if raw is None else raw.decode("utf-8", errors="backslashreplace")
    return {"id": token_id, "text": text, "signature": list(table.signatures[token_id])}


def explain_next(model, ids, position, top_k, scores, plain, log_p=None):
    """The entries that every language model has, from the scores (V,) of its tokens."""
    tau = model.config.calibration
    best = best_first(scores / tau, top_k)  # as generate sees them
    best = best[scores[best].isfinite()].tolist()
    follows = ids[0, position + 1 : position + 2].tolist()
    entries = [explain_token(model, i, scores, plain, log_p) for i in best + follows]
    differ = ((scores / tau).softmax(0) - (plain / tau).softmax(0)).abs()  # (V,)
    return {
        "position": position,
        "vocab_size": model.config.vocab_size,
        "calibration": tau,
        "tokens": [token_entry(model, i) for i in ids[0].tolist()],
        "top_tokens": entries[: len(best)],
        "next": entries[-1] if follows else None,
        "scores": [x if x > -torch.inf else None for x in scores.tolist()],
        "total_variation": differ.sum().item() / 2,
    }


def explain_token(model, token_id, scores, plain, log_p):
    entry, score = token_entry(model, token_id), scores[token_id]
    if log_p is not None:
        hash_map = model.model.hash_map
        same = (hash_map == hash_map[token_id]) & plain.isfinite().unsqueeze(1)  # (V, H)
        entry["left"] = same.cumprod(1).sum(0).tolist()
        entry["log_p"] = [log_p[j, b].item() for j, b in enumerate(entry["signature"])]
        entry["joint_prob"] = score.exp().item()
    names = ("rank", "score", "log_prob_paper", "log_prob", "log_prob_before")
    if not score.isfinite():
        return entry | dict.fromkeys(names)
    found = 1 + int((scores > score).sum()), score.item()
    for values, tau in ((scores, 1), *((x, model.config.calibration) for x in (scores, plain))):
        found += ((values / tau).log_softmax(0)[token_id].item(),)
    return entry | dict(zip(names, found))


def bucket_entry(model, scores, top_k, function, bucket, **more):
    inside = model.model.hash_map[:, function] == bucket  # (V,)
    members = (inside & scores.isfinite()).nonzero()[:, 0]
    best = members[best_first(scores[members], top_k)].tolist()
    mass = (scores[members].logsumexp(0) - scores.logsumexp(0)).exp().item()
    entry = {"bucket": bucket, "num_tokens": len(members), "mass": mass}
    return entry | {"tokens": [token_entry(model, i) for i in best]} | more


def explain_functions(model, log_p, scores, top_tokens, top_k):
    entries = []
    for j, p in enumerate(log_p.exp()):  # (B,)
        top = best_first(log_p[j], top_k).tolist()
        paths = dict.fromkeys(entry["signature"][j] for entry in top_tokens)
        found = {
            b: bucket_entry(model, scores, top_k, j, b, prob=p[b].item()) for b in {*top, *paths}
        }
        lists = {"top": [found[b] for b in top], "paths": [found[b] for b in paths]}
        entropy = -(p * p.log2()).nansum().item()
        entries.append({"function": j, **lists, "entropy_bits": entropy})
    return entries


def explain_tries(model, token_id):
    """How the token came by its last id; None where nothing was hashed, or it is not known how."""
    table, token = model.signatures, model.signatures.tokens[token_id]
    if token is None or token_id == table.pad_id or table.shared:
        return None
    tries = table.trace(token)
    if tries[-1][1] != table.signatures[token_id][-1]:
        return None  # the ids of the checkpoint were made in another way than this mhf.py's
    return named_tries(model, tries)


def named_tries(model, tries):
    owners = [None if i is None else token_entry(model, i) for *_, i in tries]
    return [{"seed": s, "last": last, "owner": o} for (s, last, _), o in zip(tries, owners)]


@torch.no_grad()
def explain_word(model, word):
    """Some bytes as a token, known or new: id or None, signature, its functions, tries."""
    table = model.signatures
    if word in table.tokens:
        token_id = table.tokens.index(word)
        signature, tries = table.signatures[token_id], explain_tries(model, token_id)
    else:
        token_id, lsh = None, mhf.lsh_ids([word], table.num_lsh, table.num_buckets)[0]
        tries = named_tries(model, table.trace(word))
        signature = (*next(table.candidates(word, lsh))[:-1], tries[-1]["last"])
    scores = torch.zeros(len(table), device=model.device)
    functions = [bucket_entry(model, scores, 10, j, b) for j, b in enumerate(signature)]
    found = {"id": token_id, "signature": list(signature)}
    return found | {"functions": functions, "tries": tries}
