"""Saving and loading: models and configurations; what is damaged is refused by its file's name."""

import dataclasses
import json
import re
from unittest import mock

import huggingface_hub
import pytest
import torch
from conftest import PAD, build, close, refused
from safetensors.torch import load_file, save_file

import mhf
from mhf import Config

NORM, MAP = "model.norm.weight", "model.hash_map"
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ANY = (ValueError, OSError)  # what the programs show as one sentence


@pytest.fixture
def folder(tmp_path):
    """A saved MultiHashFormer with unassigned ids, in a folder with a space and accents."""
    build(unassigned=(4, 19)).save_pretrained(tmp_path / "mon modèle à moi")
    return tmp_path / "mon modèle à moi"


def edit_tensors(folder, change):
    """Write model.safetensors again after `change` of the dictionary of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit_config(folder, **entries):
    """Replace entries of config.json; the text "absent" takes one away."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | entries
    text = json.dumps({k: v for k, v in config.items() if v != "absent"})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def shard(folder):
    """Split model.safetensors in several files, with the index that Hugging Face writes."""
    tensors = load_file(folder / "model.safetensors")
    huggingface_hub.save_torch_state_dict(tensors, folder, max_shard_size="6KB")
    return folder


def same(model, other):
    """Both have the same parameters and buffers, bit for bit."""
    a, b = model.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip(model, kind, ids, tmp_path):
    """Loading gives the class, parameters and results that were saved, in float32; expanded too."""
    model.to(kind).expand([b"new"])
    model.save_pretrained(tmp_path)
    loaded = mhf.load(str(tmp_path))
    assert load_file(tmp_path / "model.safetensors")["model.norm.weight"].dtype == kind
    assert type(loaded) is type(model) and same(loaded, model.float()) and not loaded.training
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    ids[0, 2] = 20  # the new token
    assert torch.equal(loaded.log_probs(ids), model.log_probs(ids))


@pytest.mark.parametrize("fields", [
    {}, {"unassigned": (4, 19)}, {"H": 1, "B": 8}, {"num_lsh": 1}, {"num_lsh": 3, "B": 64},
], ids=str)  # fmt: skip
def test_signatures_survive(fields, tmp_path):
    """A loaded table has the same ids, traces and further ids, these without a tokens.txt, too."""
    model = build(**({"B": 16} | fields))
    model.expand([b""])
    model.save_pretrained(tmp_path)
    loaded = mhf.load(tmp_path)
    (tmp_path / "tokens.txt").unlink()
    published = mhf.load(tmp_path)
    for tokens in ([], [b"new", b"newer"]):
        for m in (loaded, model, published):
            m.expand(tokens)
        assert torch.equal(published.signatures.ids, model.signatures.ids)
        for name in ("signatures", "tokens", "owner", "pad_id", "shared"):
            assert getattr(loaded.signatures, name) == getattr(model.signatures, name), name
    for token in filter(None, model.signatures.tokens[-6:]):
        assert loaded.signatures.trace(token) == model.signatures.trace(token)
    with pytest.raises(ValueError):
        loaded.expand([b""])


def test_saving_over_the_loaded_folder(folder):
    """Shards load as the one file did; a model can replace what it came from; no old file stays."""
    expected, model = mhf.load(folder), mhf.load(shard(folder))
    assert same(model, expected)
    model.model.norm.weight.data += 0.5
    for _ in range(2):  # over shards, and over one file
        model.save_pretrained(folder)
        assert [file.name for file in folder.glob("*.safetensors*")] == ["model.safetensors"]
        assert same(mhf.load(folder), model)


def test_run_folder_names_its_last_checkpoint(folder):
    """A folder with a file `last` loads its model.safetensors, in which the head may stand."""
    (folder.parent / "last").write_text(f"{folder.name}\n", encoding="utf-8")
    model = mhf.load(folder)
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: tensors[TABLE].clone()}))
    zeros = {k: torch.zeros_like(t) for k, t in model.state_dict().items()}
    save_file(zeros, folder / "consolidated.safetensors")
    assert same(mhf.load(folder.parent), model)


@pytest.mark.parametrize("name", ["absent", "absent/deeper", "absent/deeper/still"])
def test_missing_folder_is_named(tmp_path, name):
    """A folder that does not exist is an error with its name, without a network, too."""
    refused(lambda: mhf.load(name), name, kind=ANY)
    refused(lambda: mhf.load(tmp_path / name), name, kind=ANY)


@pytest.mark.parametrize("revision", [None, "checkpoint-20000"])
def test_hub_id_is_fetched(folder, revision, monkeypatch):
    """owner/name that is no folder is fetched at its revision; an error on the way names it."""
    fetch = mock.Mock(return_value=str(folder))
    monkeypatch.setattr(mhf, "snapshot_download", fetch)
    assert same(mhf.load("owner/name", revision=revision), mhf.load(folder))
    patterns = fetch.call_args.kwargs.pop("allow_patterns", None)
    assert fetch.call_args == mock.call("owner/name", revision=revision)
    files = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokens.txt",
             "model.safetensors.index.json", "tokenizer.json"]  # fmt: skip
    found = huggingface_hub.utils.filter_repo_objects(files, allow_patterns=patterns)
    assert [*found] == files
    fetch.side_effect = ConnectionError("no route to host")
    refused(lambda: mhf.load("owner/name", revision=revision), "owner/name", kind=ANY)


def update(name, change):
    """Replace the tensor `name` by what `change` makes of it."""
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


DAMAGED = [  # what is done to the tensors, and what the error says
    (lambda tensors: tensors.update(other=tensors.pop(NORM)), ["other", NORM]),
    (lambda tensors: tensors.pop(MAP), [MAP]),
    (lambda tensors: tensors.update({HEAD: tensors[TABLE] + 1}), [HEAD]),  # not the tied one
    (update(NORM, lambda x: torch.ones(17)), [NORM, "17", "16"]),
    (update(MAP, lambda x: 6 * x), ["hash_map|signature"]),  # B and more
    (update(MAP, lambda x: -x), ["hash_map|signature"]),
    (update(MAP, lambda x: x[:, :2]), ["hash_map|signature"]),
    (update(MAP, lambda x: torch.cat((x, x[:, :1]), 1)), ["hash_map|signature"]),
]


@pytest.mark.parametrize(("change", "parts"), DAMAGED)
@pytest.mark.parametrize("tokens", [True, False])
def test_damaged_tensors_are_named(folder, change, parts, tokens):
    """Tensors that do not fit are an error with their names, whether tokens are known or not."""
    if not tokens:
        (folder / "tokens.txt").unlink()
    with pytest.raises(ANY) as error:
        mhf.load(edit_tensors(folder, change))
    text = str(error.value).replace(str(folder), "")
    assert all(re.search(part, text) for part in parts) and "tokens.txt" not in text, text


@pytest.mark.parametrize("temperature", [0, 1])
def test_weights_that_are_not_numbers(model, temperature, tmp_path):
    """NaN in the weights is a ValueError, at load or before the first token; never silence."""
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 3] = torch.nan
    model.save_pretrained(tmp_path)
    refused(lambda: next(mhf.load(tmp_path).generate([3], 2, temperature=temperature)))


DAMAGE = {  # False: the file is missing, True: it is cut off
    "config.json": [False, True, b"", b"[]", b"[1, 2]", b"3", b"null", b'"text"', b"{}", b"\xff["],
    "model.safetensors": [False, True, b"", b"junk", b"\xff" * 9],
    "tokens.txt": [True, b"-\n-\n", b"!\n" * 20, b"\xff"],
}


@pytest.mark.parametrize(("name", "content"), [(n, c) for n, cs in DAMAGE.items() for c in cs])
def test_damaged_file_is_named(folder, name, content):
    """A file that is missing, empty, cut off or of another kind is an error with its name."""
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2] if content is True else content or b"")
    if content is False:
        (folder / name).unlink()
    refused(lambda: mhf.load(folder), name, kind=ANY)


def test_missing_shard_is_named(folder):
    """If one of several files is missing, the error names a tensor that was in it."""
    missing = sorted(shard(folder).glob("model-*"))[1]
    names = "|".join(load_file(missing))
    missing.unlink()
    with pytest.raises(ANY, match=names):
        mhf.load(folder)


def test_duplicates_of_a_published_checkpoint_are_kept(folder, ids):
    """Three tokens share another's signature: the ids stay, and the valid mass counts it once."""
    (folder / "tokens.txt").unlink()
    edit_tensors(folder, lambda t: t[MAP][8:11].copy_(t[MAP][7]))
    model = mhf.load(folder)
    table = model.signatures
    assert torch.equal(table.ids, load_file(folder / "model.safetensors")[MAP])
    assert table.owner[table.signatures[8]] == 7 and table.tokens == [None] * 20
    first = [*range(8), *range(11, 20)]
    close(model.valid_mass(ids), model.token_scores(model(ids))[..., first].exp().sum(-1))


def test_stored_signatures_win(folder, ids, monkeypatch):
    """With other hash functions an old checkpoint computes what it did, and can be expanded."""
    expected, hashed = mhf.load(folder), mhf.hash128
    monkeypatch.setattr(mhf, "hash128", lambda data, seed: hashed(data, seed + 1))
    model = mhf.load(folder)
    assert same(model, expected) and model.signatures.owner == expected.signatures.owner
    assert torch.equal(model.log_probs(ids), expected.log_probs(ids))
    model.expand([b"new", b"newer"])
    assert len(model.signatures.owner) == 18 + 2


UNSUPPORTED = [
    ({"lsh_only_embed": True}, ["lsh_only_embed", True]),
    ({"attention_bias": True}, ["attention_bias", True]),
    ({"use_sliding_window": True}, ["use_sliding_window", True]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ({"tie_word_embeddings": False}, ["tie_word_embeddings", False]),
    ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, ["yarn"]),
    ({"rope_parameters": {"rope_theta": 1e6, "type": "yarn", "factor": 4}}, ["yarn"]),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn"]),
    ({"rope_parameters": "absent", "rope_scaling": {"type": "linear", "factor": 2}}, ["linear"]),
    ({"rope_scaling": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", 0.5]),
    ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 500.0}, ["rope_theta", 500.0]),
    ({"rope_parameters": {"rope_type": "default"}}, ["rope_theta"]),
    ({"rope_parameters": "absent"}, ["rope_theta"]), ({"pad_token_id": 99}, ["pad", 99]),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "values"), UNSUPPORTED, ids=str)
def test_unsupported_setting_is_refused(folder, entries, values):
    """What is not implemented is refused by name, wherever it stands; a theta is never guessed."""
    refused(lambda: mhf.load(edit_config(folder, **entries)), *values)


def test_unknown_settings_are_written_back(folder, tmp_path):
    """Entries that this implementation does not know or use come back as they were."""
    entries = {"their_note": {"a": [1, None]}, "transformers_version": "9.9", "bos_token_id": 1}
    entries |= {"eos_token_id": [7, 9], "fused_decoding": True}
    expected, loaded = mhf.load(folder), mhf.load(edit_config(folder, **entries))
    assert same(loaded, expected) and loaded.config.extra["eos_token_id"] == [7, 9]
    loaded.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))
    assert {k: written[k] for k in entries} == entries


ENTRIES = [
    ({"use_conditional_prob": True, "objective": "absent"}, "objective", "exact"),
    ({"use_conditional_prob": False, "objective": "absent"}, "objective", "independent"),
    ({"use_conditional_prob": True, "objective": "joint"}, "objective", "joint"),
    ({"calibration": "absent"}, "calibration", 1.0),
    ({"model": "absent"}, "model", "mhf"),
    ({"model": "absent", "num_hashes": "absent"}, "model", "standard"),
    ({"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, "rope_theta", 500.0),
    ({"rope_parameters": {"rope_theta": 500}, "rope_theta": 500.0}, "rope_theta", 500.0),
    ({"rope_parameters": "absent", "rope_theta": 500.0}, "rope_theta", 500.0),
    ({"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": None}, "rope_theta", 500.0),
    ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0}, "rope_theta", 500.0),
]


@pytest.mark.parametrize(("entries", "field", "value"), ENTRIES, ids=str)
def test_entries_that_may_be_absent(folder, entries, field, value):
    """What fields are where a published config.json lacks them, or has them elsewhere."""
    config = Config.load(edit_config(folder, **entries) / "config.json")
    config.save(folder / "config.json")
    again = Config.load(folder / "config.json")
    assert getattr(config, field) == getattr(again, field) == value


@pytest.mark.parametrize("objective", mhf.OBJECTIVES)
@pytest.mark.parametrize("name", ["mhf", "standard"])
def test_config_survives(name, objective, tmp_path):
    """save and load keep every field; use_conditional_prob is true for P renormalised."""
    config = Config(hidden_size=96, rope_theta=5e3, calibration=1.5, joint_weight=0.5,
                    pad_token_id=PAD, model=name, objective=objective)  # fmt: skip
    config.save(tmp_path / "config.json")
    assert dataclasses.replace(Config.load(str(tmp_path / "config.json")), extra={}) == config
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert written["use_conditional_prob"] == (objective != "independent")
