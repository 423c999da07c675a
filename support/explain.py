"""Everything behind one prediction, as a dict that json can write: for sample.py and the demo."""

import torch
import torch.nn.functional as F


@torch.no_grad()
def explain(model, ids, position=-1, top_k=10, force=None):
    """What a model makes of the token at a position of one sequence, and what it expects next.

    force = {function, from 0: bucket} asks "what if": the bucket's row takes the place of the soft
    embedding. Lists hold up to top_k entries, best first, of equals the lowest id. None: it does
    not exist here, or a changed gate has no such thing. ValueError for arguments out of range.

    tokens       of every input token: id, text, signature; gate, the weight of each row;
                 gate_scores, before the softmax; row_norms; residual, the norm of
                 W_s sum_j alpha_j e_j + b_s - x
    top_tokens   the most probable next tokens: id, text, signature, rank; log_p of each function;
                 score, their sum; joint_prob, its exponential; log_prob_paper, renormalised over
                 the vocabulary; log_prob, renormalised and calibrated
    next         the same of the token that follows in ids
    signature    of the token: functions, its buckets, with expected, the mean number of tokens in a
                 bucket; neighbours, the tokens that share most ids; shared, how many share 0, 1,
                 ..., H ids; tries for its last id
    functions    of each: top buckets with prob; entropy_bits; soft_embedding_norm; nearest rows
                 with cosine; forced; compatible, how many tokens are in the top (or forced) bucket
                 of this and all earlier functions; compatible_mass, their probability
    valid_mass   the probability of all signatures that tokens have
    Each bucket has num_tokens, the best tokens, and mass, the renormalised probability of them all.
    """
    ids, position, force = check(model, ids, position, top_k, force)
    steps, log_p, scores = predict(model, ids, position, force)
    found = explain_next(model, ids, position, top_k, scores, log_p)
    if log_p is not None:
        token_id = ids[0, position].item()
        explain_gate(model, ids, found["tokens"])
        found["signature"] = explain_signature(model, token_id, scores, top_k)
        found["functions"] = explain_functions(model, steps, log_p, scores, top_k, force)
        found["valid_mass"] = scores[list(model.signatures.owner.values())].exp().sum().item()
    return found


def check(model, ids, position=-1, top_k=1, force=None):
    """The arguments of explain as ids (1, T), a position from 0 on and a dict; else ValueError."""
    V, B, H = model.config.vocab_size, model.config.num_buckets, model.config.num_hashes
    H, force = 0 if model.config.model == "standard" else H, force or {}
    ids = torch.atleast_2d(torch.as_tensor(ids, device=model.device))  # (1, T)
    if len(ids) > 1:
        raise ValueError(f"one sequence is explained at a time, not {len(ids)}")
    if position not in range(-ids.shape[1], ids.shape[1]):
        raise ValueError(f"position {position} is outside the {ids.shape[1]} tokens")
    if top_k not in range(1, V + 1):
        raise ValueError(f"top_k must be from 1 to {V}, not {top_k}")
    for j, bucket in force.items():
        if j not in range(H) or bucket not in range(B):
            raise ValueError(f"force {j}: {bucket} is outside the {H} functions of {B} buckets")
    return ids, int(position) % ids.shape[1], force


def predict(model, ids, position, force):
    """What follows a position of ids (1, T): cascade steps, log p_j (H, B), token scores (V,)."""
    h = model(ids)[0, position]  # (D,)
    if model.config.model == "standard":
        return [], None, model.token_scores(h)  # (V,)
    steps = list(model.hash_head.steps(h, model.table, force))
    log_p = torch.stack([o for o, _ in steps]).float().log_softmax(-1)  # (H, B)
    return steps, log_p, model.sum_over_signatures(log_p.view(-1, 1))[:, 0]  # (V,)


def best_first(values, top_k=None):
    """Indices of the largest values (n,). The sort is stable: of equals the lowest comes first."""
    return values.argsort(descending=True, stable=True)[:top_k]


def token_entry(model, token_id):
    if not (table := getattr(model, "signatures", None)):
        return {"id": token_id, "text": None, "signature": None}
    raw = table.tokens[token_id]
    text = None if raw is None else raw.decode("utf-8", errors="backslashreplace")
    return {"id": token_id, "text": text, "signature": list(table.signatures[token_id])}


def explain_next(model, ids, position, top_k, scores, log_p=None):
    """The entries that every language model has, from the scores (V,) of its tokens."""
    best = best_first(scores / model.config.calibration, top_k)  # as generate sees them
    best = best[scores[best].isfinite()].tolist()
    follows = ids[0, position + 1 : position + 2].tolist()
    entries = [explain_token(model, i, scores, log_p) for i in best + follows]
    return {
        "position": position,
        "vocab_size": model.config.vocab_size,
        "calibration": model.config.calibration,
        "tokens": [token_entry(model, i) for i in ids[0].tolist()],
        "top_tokens": entries[: len(best)],
        "next": entries[-1] if follows else None,
    }


def explain_token(model, token_id, scores, log_p):
    entry, score = token_entry(model, token_id), scores[token_id]
    if log_p is not None:
        entry["log_p"] = [log_p[j, b].item() for j, b in enumerate(entry["signature"])]
        entry["joint_prob"] = score.exp().item()
    if not score.isfinite():
        return entry | dict.fromkeys(("rank", "score", "log_prob_paper", "log_prob"))
    entry |= {"rank": 1 + int((scores > score).sum()), "score": score.item()}
    for name, tau in (("log_prob_paper", 1.0), ("log_prob", model.config.calibration)):
        entry[name] = (score / tau - (scores / tau).logsumexp(0)).item()
    return entry


def explain_gate(model, ids, entries):
    """Add how the rows of every token are weighed; None for what a changed gate does not have."""
    rows, combiner = model.model.embed_tokens(model.rows[ids]), model.model.combiner
    x, gate = model.embed(ids, return_gate=True)  # (1, T, D), (1, T, H)
    found = dict.fromkeys(("gate", "gate_scores", "residual")) | {"row_norms": rows.norm(dim=-1)}
    if gate is not None and gate.shape == rows.shape[:-1]:
        found["gate"] = gate
        if hasattr(combiner, "scorer"):
            found["gate_scores"] = combiner.scorer(rows).squeeze(-1)  # (1, T, H)
        if hasattr(combiner, "output_proj"):
            mixed = (gate.cpu().double().unsqueeze(-1) * rows.cpu()).sum(-2).to(x)  # (1, T, D)
            found["residual"] = (combiner.output_proj(mixed) - x).norm(dim=-1)  # (1, T)
    for name, values in found.items():
        for t, entry in enumerate(entries):
            entry[name] = None if values is None else values[0, t].tolist()


def bucket_entry(model, scores, top_k, function, bucket, **more):
    inside = model.model.hash_map[:, function] == bucket  # (V,)
    members = (inside & scores.isfinite()).nonzero()[:, 0]
    best = members[best_first(scores[members], top_k)].tolist()
    mass = (scores[members].logsumexp(0) - scores.logsumexp(0)).exp().item()
    entry = {"bucket": bucket, "num_tokens": len(members), "mass": mass}
    return entry | {"tokens": [token_entry(model, i) for i in best]} | more


def explain_functions(model, steps, log_p, scores, top_k, force):
    entries, compatible, given = [], scores.isfinite(), (model, scores, top_k)
    for j, (_, soft) in enumerate(steps):
        p, norm, cosine = log_p[j].exp(), None, log_p.new_empty(0)  # (B,)
        if soft is not None:  # the last function hands nothing on
            norm = soft.norm().item()
            cosine = F.cosine_similarity(model.table[j], soft, dim=-1)  # (B,)
        top, near = best_first(log_p[j], top_k).tolist(), best_first(cosine, 3).tolist()
        compatible = compatible & (model.model.hash_map[:, j] == force.get(j, top[0]))  # (V,)
        entries.append({
            "function": j,
            "top": [bucket_entry(*given, j, b, prob=p[b].item()) for b in top],
            "entropy_bits": -(p * p.log2()).nansum().item(),
            "soft_embedding_norm": norm,
            "nearest": [bucket_entry(*given, j, b, cosine=cosine[b].item()) for b in near],
            "forced": force.get(j),
            "compatible": int(compatible.sum()),
            "compatible_mass": scores.softmax(0)[compatible].sum().item(),
        })  # fmt: skip
    return entries


def explain_signature(model, token_id, scores, top_k):
    table, hash_map = model.signatures, model.model.hash_map
    signature, given = table.signatures[token_id], (model, scores, top_k)
    mean = int(hash_map.any(-1).sum()) / (table.num_buckets - 1)  # without pad and unused ids
    others = scores.isfinite()  # (V,)
    others[token_id] = False
    common = (hash_map == hash_map[token_id]).sum(-1)  # (V,) ids in common
    near = (others & (common > 0)).nonzero()[:, 0]
    near = near[best_first(scores[near])]
    near = near[best_first(common[near], top_k)].tolist()
    return {
        "id": token_id,
        "functions": [bucket_entry(*given, j, b, expected=mean) for j, b in enumerate(signature)],
        "neighbours": [token_entry(model, i) | {"shared": int(common[i])} for i in near],
        "shared": common[others].bincount(minlength=len(signature) + 1).tolist(),
        "tries": explain_tries(model, token_id),
    }


def explain_tries(model, token_id):
    table, token = model.signatures, model.signatures.tokens[token_id]
    if token is None or token_id == table.pad_id or table.shared:
        return None
    tries = table.trace(token)
    if tries[-1][1] != table.signatures[token_id][-1]:
        return None  # the ids of the checkpoint were made in another way than this mhf.py's
    owners = [None if i is None else token_entry(model, i) for *_, i in tries]
    return [{"seed": s, "last": last, "owner": o} for (s, last, _), o in zip(tries, owners)]
