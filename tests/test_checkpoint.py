"""Saving and loading: models, configurations, tokenizers; what is damaged is refused by name."""

import base64
import dataclasses
import json
import shutil

import huggingface_hub
import pytest
import tiktoken
import torch
from conftest import build, one_sentence
from safetensors.torch import load_file, save_file

import mhf
from mhf import Config, MultiHashFormer, SignatureTable, Tokenizer, Transformer


def save(model, folder, **keywords):
    model.save_pretrained(folder, **keywords)
    return folder


@pytest.fixture
def folder(tmp_path):
    """A saved MultiHashFormer with unassigned ids, in a folder with a space and accents."""
    return save(build(unassigned=(4, 19)), tmp_path / "mon modèle à moi")


def edit_tensors(folder, change):
    """Write model.safetensors again after `change` of the dictionary of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit_config(folder, **entries):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | entries
    text = json.dumps({k: v for k, v in config.items() if v != "absent"})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def published(model, folder):
    """A checkpoint as others publish it: config.json and model.safetensors alone."""
    whole = save(model, folder / "whole")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(whole / name, folder)
    shutil.rmtree(whole)
    return folder


def shard(folder, missing=False):
    """Split model.safetensors in two, with the index that Hugging Face writes."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for i in (0, 1):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({k: tensors[k] for k in names[i::2]}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names[i::2], file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    if missing:
        (folder / file).unlink()
    return folder


def same(model, other):
    """Both have the same parameters and buffers, bit for bit."""
    a, b = model.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---------------------------------------------------------------------------------------------
# Round trips
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [mhf.load, None], ids=["load", "from_pretrained"])
def test_round_trip(model, load, tmp_path):
    """Loading gives the class, the parameters, and the results that were saved."""
    loaded = (load or type(model).from_pretrained)(save(model, tmp_path))
    ids = torch.tensor([[3, 0, 19]])
    assert type(loaded) is type(model) and same(loaded, model) and not loaded.training
    assert torch.equal(loaded.log_probs(ids), model.log_probs(ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_in_another_precision(model, dtype, tmp_path):
    """dtype is that of the parameters in the file; loaded they are float32, rounded to it."""
    loaded = mhf.load(save(model, tmp_path, dtype=dtype))
    stored = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in stored.values() if t.is_floating_point()} == {dtype}
    for p, q in zip(loaded.parameters(), model.parameters(), strict=True):
        assert p.dtype == torch.float32 and torch.equal(p, q.to(dtype).float())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"unassigned": (4, 19)},
        {"H": 1, "B": 8},
        {"num_lsh": 1},
        {"num_lsh": 3, "B": 64},
    ],
    ids=str,
)
def test_signatures_survive(fields, tmp_path):
    """A loaded table has the tokens: the same signatures, traces and further signatures."""
    model = build(**({"B": 16} | fields))
    loaded = mhf.load(save(model, tmp_path))
    known = [token for token in model.signatures.tokens if token is not None]
    assert torch.equal(loaded.signatures.ids, model.signatures.ids)
    for token in known:
        assert loaded.signatures.trace(token) == model.signatures.trace(token)
    for m in (loaded, model):
        m.expand([b"new", b"newer"])
    assert torch.equal(loaded.signatures.ids, model.signatures.ids)


def test_a_token_without_bytes_survives(tmp_path):
    """Also an empty token is stored and found again, where it is the last."""
    model = build()
    model.expand([b""])
    loaded = mhf.load(save(model, tmp_path))
    assert loaded.signatures.trace(b"") == model.signatures.trace(b"")


def test_expanded_model_survives(tmp_path):
    """An expanded model is saved with its new tokens and can be expanded further."""
    model = build()
    model.expand([b"new"])
    loaded = mhf.load(save(model, tmp_path))
    loaded.expand([b"newer"])
    with pytest.raises(ValueError):
        loaded.expand([b"new"])
    assert len(loaded.signatures) == loaded.config.vocab_size == 22


def test_expanded_standard_model_survives(tmp_path):
    """The baseline's appended rows are saved, and its vocabulary with them."""
    model = build(standard=True)
    model.expand([b"new"])
    assert same(mhf.load(save(model, tmp_path)), model)


def test_saving_over_the_loaded_folder(folder):
    """A model can replace the checkpoint that it was loaded from, in another precision too."""
    model = mhf.load(folder)
    with torch.no_grad():
        model.model.norm.weight.add_(0.5)
    assert same(mhf.load(save(model, folder)), model)
    rounded = mhf.load(save(model, folder, dtype=torch.bfloat16))
    assert same(mhf.load(save(rounded, folder)), rounded)


def test_sharded_checkpoint(folder):
    """Several files named by an index load as the one file did."""
    model = mhf.load(folder)
    assert same(mhf.load(shard(folder)), model)


def test_saving_over_shards_leaves_one_checkpoint(folder):
    """The shards of the checkpoint before are gone, so that nothing old is loaded."""
    model = mhf.load(shard(folder))
    with torch.no_grad():
        model.model.norm.weight.add_(0.5)
    save(model, folder)
    assert [file.name for file in folder.glob("*.safetensors*")] == ["model.safetensors"]
    assert same(mhf.load(folder), model)


def test_missing_shard_is_named(folder):
    """A shard that the index names and the folder lacks is a ValueError with its name."""
    with pytest.raises(ValueError, match="model-00002-of-00002.safetensors") as error:
        mhf.load(shard(folder, missing=True))
    one_sentence(error)


def test_tied_head_in_the_file(folder):
    """lm_head.weight may be stored beside the table if it is equal."""
    model = mhf.load(folder)
    table = model.state_dict()["model.embed_tokens.weight"]
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": table.clone()}))
    assert same(mhf.load(folder), model)


def test_untied_head_is_refused(folder):
    """An lm_head.weight other than the table is a ValueError that names it."""
    head = torch.zeros(18, 16)
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    with pytest.raises(ValueError) as error:
        mhf.load(folder)
    one_sentence(error, "lm_head.weight")


# ---------------------------------------------------------------------------------------------
# Where a checkpoint is found
# ---------------------------------------------------------------------------------------------


def test_run_folder_names_its_last_checkpoint(folder):
    """A folder with a file `last` loads the checkpoint that it names."""
    (folder.parent / "last").write_text(f"{folder.name}\n", encoding="utf-8")
    assert same(mhf.load(folder.parent), mhf.load(folder))


@pytest.mark.parametrize("name", ["absent", "absent/deeper/still"])
def test_missing_folder_is_named(tmp_path, name):
    """A folder that does not exist is a ValueError with its name; no hub is asked."""
    with pytest.raises(ValueError, match=name) as error:
        mhf.load(tmp_path / name)
    one_sentence(error)


@pytest.mark.parametrize("revision", [None, "checkpoint-20000"])
def test_hub_id_is_fetched(folder, revision, monkeypatch):
    """owner/name that is no folder goes to snapshot_download, with the revision."""
    asked = []

    def fetch(name, *, revision=None, **keywords):
        asked.append((name, revision))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    loaded = MultiHashFormer.from_pretrained("owner/name", revision=revision)
    assert asked == [("owner/name", revision)] and same(loaded, mhf.load(folder))


def test_failing_hub_is_one_sentence(monkeypatch):
    """If the hub cannot be reached the ValueError names the id and the revision."""

    def fail(*args, **keywords):
        raise ConnectionError("many\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError) as error:
        mhf.load("owner/name", revision="checkpoint-7")
    one_sentence(error, "owner/name", "checkpoint-7")


@pytest.mark.parametrize(
    ("saved", "cls"), [(True, MultiHashFormer), (False, Transformer)], ids=["standard", "mhf"]
)
def test_the_other_class_is_refused(saved, cls, tmp_path):
    """from_pretrained of one class does not load a checkpoint of the other."""
    save(build(standard=saved), tmp_path)
    with pytest.raises(ValueError) as error:
        cls.from_pretrained(tmp_path)
    one_sentence(error, tmp_path.name)


# ---------------------------------------------------------------------------------------------
# Damaged and foreign checkpoints
# ---------------------------------------------------------------------------------------------


def test_missing_and_unknown_keys_are_named(folder):
    """A parameter too few and one too many: both names stand in one ValueError."""
    edit_tensors(folder, lambda t: t.update({"model.other.weight": t.pop("model.norm.weight")}))
    with pytest.raises(ValueError) as error:
        mhf.load(folder)
    one_sentence(error, "model.norm.weight", "model.other.weight")


def test_wrong_shape_is_named(folder):
    """A parameter of another shape is a ValueError with its name and both shapes."""
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(17)}))
    with pytest.raises(ValueError) as error:
        mhf.load(folder)
    one_sentence(error, "model.norm.weight", 17, 16)


def test_missing_hash_map_is_named(folder):
    """A MultiHashFormer without signatures is a ValueError that says so."""
    edit_tensors(folder, lambda tensors: tensors.pop("model.hash_map"))
    with pytest.raises(ValueError) as error:
        mhf.load(folder)
    one_sentence(error, "model.hash_map")


def test_hash_map_beyond_the_buckets_is_refused(folder):
    """An id of B or more would read another function's row: a ValueError with id and B."""
    edit_tensors(folder, lambda tensors: tensors["model.hash_map"][5].fill_(6))
    with pytest.raises(ValueError) as error:
        mhf.load(folder)
    one_sentence(error, 6)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file_is_named(folder, name):
    """Without one of its files a checkpoint is a ValueError with the file's name."""
    (folder / name).unlink()
    with pytest.raises(ValueError) as error:
        mhf.load(folder)
    one_sentence(error, name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_truncated_file_is_named(folder, name, share):
    """A file cut off is a ValueError with the file's name."""
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError) as error:
        mhf.load(folder)
    one_sentence(error, name)


@pytest.mark.parametrize("text", ["{", '{"num_hashes": }', "[1, 2]", "\ufffd"])
def test_config_that_is_no_json_object_is_refused(folder, text):
    """A config.json that is not a JSON object is a ValueError that names config.json."""
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as error:
        mhf.load(folder)
    one_sentence(error, "config.json")


def share_signatures(tensors):
    """Give tokens 8, 9 and 10 the signature of token 7, as the authors' code can."""
    tensors["model.hash_map"][8:11] = tensors["model.hash_map"][7]


def test_duplicates_of_a_published_checkpoint_are_reported(tmp_path, capsys):
    """Three tokens share another's signature: the number is said, and the ids are kept."""
    edit_tensors(published(build(), tmp_path), share_signatures)
    table = mhf.load(tmp_path).signatures
    said = "".join(capsys.readouterr())
    assert "3" in said and table.stats()["duplicates"] == 3
    assert torch.equal(table.ids, load_file(tmp_path / "model.safetensors")["model.hash_map"])


def test_published_checkpoint_without_duplicates_is_quiet(tmp_path, capsys):
    """Nothing is said where there is nothing to say."""
    mhf.load(published(build(), tmp_path))
    assert not "".join(capsys.readouterr())


@pytest.mark.parametrize("num_lsh", [0, 2])
def test_published_checkpoint_expands(num_lsh, tmp_path):
    """Without its tokens a checkpoint gives new ones the signatures that the whole table gives."""
    model = build(num_lsh=num_lsh, B=16)
    loaded = mhf.load(published(model, tmp_path))
    for m in (model, loaded):
        m.expand([b"new", b"newest"])
    assert torch.equal(loaded.signatures.ids, model.signatures.ids)


def test_published_checkpoint_expands_again_after_a_round_trip(tmp_path, capsys):
    """Expanded, saved and loaded again, it differs from nothing and takes further tokens."""
    model = mhf.load(published(build(B=16), tmp_path))
    model.expand([b"new"])
    loaded = mhf.load(save(model, tmp_path / "again"))
    assert "differ" not in "".join(capsys.readouterr())
    loaded.expand([b"newer"])
    assert len(loaded.signatures.ids.unique(dim=0)) == 22


@pytest.fixture
def tampered(folder):
    """A checkpoint in whose hash_map three tokens have other signatures than this code gives."""

    def rotate(tensors):
        tensors["model.hash_map"][7:10] = tensors["model.hash_map"][[8, 9, 7]]

    return edit_tensors(folder, rotate)


def test_stored_signatures_win(tampered, capsys):
    """The stored ids are used where rebuilt ones differ, and how many is said."""
    model = mhf.load(tampered)
    assert "3 of 20 signatures differ" in "".join(capsys.readouterr())
    stored = load_file(tampered / "model.safetensors")["model.hash_map"]
    assert torch.equal(model.signatures.ids, stored)
    assert model.signatures.lookup(stored[8].tolist()) == 8


def test_differing_signatures_refuse_expansion(tampered):
    """New tokens hashed by a rule that the stored ones do not follow: expand is a ValueError."""
    model = mhf.load(tampered)
    with pytest.raises(ValueError, match="3 of 20 signatures differ") as error:
        model.expand([b"new"])
    one_sentence(error)
    assert model.config.vocab_size == 20


def test_stored_signatures_win_over_tokens_of_another_vocabulary(folder, tmp_path):
    """The bytes of 22 tokens beside a hash_map of 20: its ids are used, and expand refuses."""
    other = save(build(V=22), tmp_path / "other")
    for file in other.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    model = mhf.load(folder)
    stored = load_file(folder / "model.safetensors")["model.hash_map"]
    assert torch.equal(model.signatures.ids, stored)
    with pytest.raises(ValueError) as error:
        model.expand([b"new"])
    one_sentence(error)


# ---------------------------------------------------------------------------------------------
# config.json
# ---------------------------------------------------------------------------------------------

UNSUPPORTED = [
    ({"lsh_only_embed": True}, ["lsh_only_embed", True]),
    ({"attention_bias": True}, ["attention_bias", True]),
    ({"use_sliding_window": True}, ["use_sliding_window", True]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ({"tie_word_embeddings": False}, ["tie_word_embeddings", False]),
    ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, ["yarn"]),
    ({"rope_parameters": "absent", "rope_scaling": {"type": "linear", "factor": 2}}, ["linear"]),
]


@pytest.mark.parametrize(("entries", "values"), UNSUPPORTED)
def test_unsupported_setting_is_refused(folder, entries, values):
    """What this implementation does not do is a ValueError by name and value."""
    with pytest.raises(ValueError) as error:
        mhf.load(edit_config(folder, **entries))
    one_sentence(error, *values)


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "rope_theta": "absent"},
        {"rope_parameters": "absent", "rope_theta": 500.0},
        {"rope_parameters": None, "rope_theta": 500.0},
    ],
    ids=["rope_parameters", "rope_theta", "null"],
)
def test_rope_theta_stands_in_either_place(folder, entries):
    """theta is read from rope_parameters.rope_theta or from rope_theta."""
    assert mhf.load(edit_config(folder, **entries)).config.rope_theta == 500.0


def test_fused_decoding_is_ignored(folder):
    """fused_decoding, which the authors' code does not use, changes nothing."""
    model = mhf.load(folder)
    assert same(mhf.load(edit_config(folder, fused_decoding=True)), model)


def test_unknown_settings_are_written_back(folder, tmp_path):
    """Entries that this implementation does not know come back as they were."""
    entries = {"their_note": {"a": [1, None]}, "transformers_version": "9.9", "eos_token_id": 7}
    save(mhf.load(edit_config(folder, **entries)), tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))
    assert {k: written[k] for k in entries} == entries


@pytest.mark.parametrize(
    ("entries", "objective"),
    [
        ({"use_conditional_prob": True, "objective": "absent"}, "exact"),
        ({"use_conditional_prob": False, "objective": "absent"}, "independent"),
        ({"use_conditional_prob": "absent", "objective": "absent"}, "independent"),
        ({"use_conditional_prob": True, "objective": "joint"}, "joint"),
    ],
)
def test_objective_of_a_config(folder, entries, objective):
    """use_conditional_prob true means exact; our own entry `objective` says more."""
    assert mhf.load(edit_config(folder, **entries)).config.objective == objective


@pytest.mark.parametrize("objective", ["independent", "exact", "joint"])
def test_conditional_prob_is_written(objective):
    """use_conditional_prob is true for the objectives with the renormalised probability."""
    written = json.loads(Config(objective=objective).to_json())
    assert written["use_conditional_prob"] == (objective != "independent")


def test_absent_calibration_is_one(folder):
    """A checkpoint without `calibration` has τ = 1."""
    assert mhf.load(edit_config(folder, calibration="absent")).config.calibration == 1.0


@pytest.mark.parametrize(("entry", "cls"), [(4, "mhf"), ("absent", "standard")])
def test_num_hashes_means_multihashformer(entry, cls):
    """Without our entry `model`, num_hashes decides which class a config.json describes."""
    written = json.loads(Config().to_json()) | {"num_hashes": entry}
    del written["model"]
    text = json.dumps({k: v for k, v in written.items() if v != "absent"})
    assert Config.from_json(text).model == cls


@pytest.mark.parametrize("name", ["mhf", "standard"])
def test_config_survives(name, tmp_path):
    """to_json and from_json, by text and by path, keep every field."""
    config = Config(hidden_size=96, rope_theta=5e3, calibration=1.5, joint_weight=0.5, model=name)
    text = config.to_json(tmp_path / "config.json")
    for source in (text, tmp_path / "config.json", str(tmp_path / "config.json")):
        assert dataclasses.replace(Config.from_json(source), extra={}) == config
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == text


# ---------------------------------------------------------------------------------------------
# Tokenizers
# ---------------------------------------------------------------------------------------------

TEXT = "the cat sat on the mat with the hat, and that was that: 1234 cats, 56 rats.\n" * 3
AWKWARD = ["1234567 12", "a\u00a0b", "\r\n\n  x", "🐈‍⬛ naïve", "<|endoftext|>", "", "it's   \t "]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXT, 280)


def test_trained_tokenizer_has_the_size_asked_for(tokenizer):
    """vocab_size counts end-of-text, the last id; every id has its bytes."""
    assert len(tokenizer) == 280 and tokenizer.eot == 279
    assert tokenizer.token_bytes(279) == b"<|endoftext|>"
    assert len({tokenizer.token_bytes(i) for i in range(280)}) == 280


@pytest.mark.parametrize("text", [TEXT, *AWKWARD])
def test_text_survives(tokenizer, text):
    """decode undoes encode, for any characters; special tokens are never read out of a text."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.eot not in ids
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_broken_bytes_decode_to_a_replacement(tokenizer):
    """Half a character decodes to U+FFFD instead of raising."""
    half = tokenizer.encode("🐈")[:1]
    assert tokenizer.decode(half) == "\ufffd"


@pytest.mark.parametrize("text", [TEXT, *AWKWARD])
def test_saved_tokenizer_gives_the_same_ids(tokenizer, text, tmp_path):
    """After save and load every text has the ids it had."""
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode(text) == tokenizer.encode(text)
    assert (len(loaded), loaded.eot) == (len(tokenizer), tokenizer.eot)


def test_tokenizer_from_a_lone_file(tokenizer, tmp_path):
    """A .tiktoken file alone is enough: our pattern, end-of-text behind the last rank."""
    tokenizer.save(tmp_path)
    shutil.move(tmp_path / "tokenizer.tiktoken", tmp_path / "mine.tiktoken")
    (tmp_path / "elsewhere").mkdir()
    lone = shutil.copy(tmp_path / "mine.tiktoken", tmp_path / "elsewhere")
    loaded = Tokenizer.load(lone)
    assert loaded.eot == 279 and loaded.encode(TEXT) == tokenizer.encode(TEXT)


def ranks_file(path, tokens):
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in tokens.items()]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_unused_ids_have_no_bytes(tmp_path):
    """A rank that the file leaves out is None, and such a vocabulary can be registered."""
    tokens = {i: bytes([i]) for i in range(256)} | {258: b"th"}
    loaded = Tokenizer.load(ranks_file(tmp_path / "gap.tiktoken", tokens))
    raw = [loaded.token_bytes(i) for i in range(len(loaded))]
    assert raw[256:259] == [None, None, b"th"]
    table = SignatureTable(2, 64)
    table.extend(raw, pad_id=loaded.eot)
    assert len(table) == len(loaded) and table.lookup((0, 0)) == loaded.eot


def test_file_without_a_byte_is_refused(tmp_path):
    """A file that lacks a single byte could not encode every text: a ValueError."""
    file = ranks_file(tmp_path / "hole.tiktoken", {i: bytes([i]) for i in range(256) if i != 65})
    with pytest.raises(ValueError) as error:
        Tokenizer.load(file)
    one_sentence(error, 1, 256)


@pytest.mark.parametrize("text", ["", "no ranks here\n", "!!!! 0\n", None], ids=repr)
def test_file_in_another_format_is_refused(tmp_path, text):
    """What is not a file of ranks, or no file, is a ValueError with its name."""
    file = tmp_path / "odd.tiktoken"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as error:
        Tokenizer.load(file)
    one_sentence(error, "odd")


@pytest.mark.parametrize(
    ("size", "values"), [(5000, [5000]), (256, [257, 256])], ids=["small text", "small vocabulary"]
)
def test_impossible_size_is_refused(size, values):
    """A text too small for the size, or a size below 257, is a ValueError with the numbers."""
    with pytest.raises(ValueError) as error:
        Tokenizer.train(TEXT, size)
    one_sentence(error, *values)


def test_named_tokenizer_without_a_network(monkeypatch):
    """If the ranks cannot be fetched the ValueError names the tokenizer and the remedy."""

    def fail(name):
        raise ConnectionError("many\nlines")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(ValueError) as error:
        Tokenizer.named("gpt2")
    one_sentence(error, "gpt2", "TIKTOKEN_CACHE_DIR")


def test_unknown_tokenizer_is_refused():
    """A name that tiktoken does not have is a ValueError that names it."""
    with pytest.raises(ValueError) as error:
        Tokenizer.named("gpt17")
    one_sentence(error, "gpt17", "gpt2")
