"""A merged model answers as its adapter on the base model does, in plain transformers, from files that are whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from trained import PLAN, trained
from transformers import AutoModelForImageTextToText, AutoTokenizer
from typer.testing import CliRunner
from worlds import FAMILIES

from sameday.cli import app
from sameday.commands import merge as command
from sameday.models import merge as merging
from sameday.record import checkpoint
from sameday.record.folder import RunFolder
from sameday.spec.errors import EXIT_DISK_FULL, BadInput, RunStopped

SHORT = {"max_steps": 2, "lora": {"r": 2, "alpha": 4}}
ON_CPU = PLAN | {"device": "cpu"}
TOKENS = torch.arange(30, 50)[None]
EARLIER = {"qwen3_vl": {}, "qwen2_5_vl": {"model.language_model.": "model.", "model.visual.": "visual."}}


def sharded(model: Path, folder: Path, size: str = "200KB", **renamed: str) -> Path:
    """The same weights in several files, under names of an earlier release where that is asked for."""
    whole = AutoModelForImageTextToText.from_pretrained(model)
    whole.save_pretrained(folder, max_shard_size=size)
    for file in model.iterdir():
        if not (folder / file.name).exists() and file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    index = json.loads((folder / merging.INDEX).read_text())
    for name in sorted(set(index["weight_map"].values())):
        tensors = {_renamed(key, renamed): tensor for key, tensor in load_file(folder / name).items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index["weight_map"] = {_renamed(key, renamed): name for key, name in index["weight_map"].items()}
    (folder / merging.INDEX).write_text(json.dumps(index))
    return folder


def _renamed(key: str, renamed: dict[str, str]) -> str:
    for before, after in renamed.items():
        if key.startswith(before):
            return after + key.removeprefix(before)
    return key


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens).logits.float()
    return found


def merged(run: Path, out: Path, *words: str) -> str:
    return CliRunner().invoke(app, ["merge", str(run), "-o", str(out), *words], catch_exceptions=False).output


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_gives_the_adapters_logits(tmp_path: Path, tiny_models: dict[str, Path], family: str) -> None:
    base = sharded(tiny_models[family], tmp_path / "base", **EARLIER.get(family, {}))
    run = trained(tmp_path, base, ON_CPU, **SHORT).run
    said = merged(run, tmp_path / "whole")
    assert "of them changed by the adapter; float32 rounds what the adapter changes by 0.0" in said
    assert said.endswith(f"written: {tmp_path / 'whole'}\n")
    files = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {"config.json", merging.INDEX, "tokenizer.json", "preprocessor_config.json", "README.md"} <= files
    assert not [name for name in files if name.startswith("adapter")] and checkpoint.fault(tmp_path / "whole") is None
    whole, told = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    index = json.loads((tmp_path / "whole" / merging.INDEX).read_text())
    assert {name.split(".")[0] for name in index["weight_map"]} <= {"model", "lm_head"}, "as transformers saves it now"
    begins = {".".join(name.split(".")[:2]) for name in index["weight_map"]} - {"lm_head.weight"}
    assert begins == {"model.language_model", "model.visual"}
    apart = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), run / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    tokens = tokenizer("what is the red one?", return_tensors="pt").input_ids
    expected, plain = logits(apart, tokens), logits(AutoModelForImageTextToText.from_pretrained(base), tokens)
    torch.testing.assert_close(logits(whole, tokens), expected, rtol=1e-4, atol=1e-5)
    assert (expected - plain).norm() > 0.01 * plain.norm(), "the adapter does something"


def test_dora_and_layers_of_the_tower_are_merged_as_peft_does(tmp_path: Path, tiny_qwen3: Path) -> None:
    targets = ["q_proj", "tower.qkv", "projector.all-linear"]
    lora = {"r": 2, "alpha": 4, "dora": True, "rslora": True, "target_modules": targets}
    run = trained(tmp_path, tiny_qwen3, ON_CPU, max_steps=2, lora=lora).run
    said = merged(run, tmp_path / "whole")
    assert ", 11 of them changed by the adapter; " in said
    fingerprint = RunFolder.read(run).recipe.fingerprint
    assert f"(recipe {fingerprint})" in (tmp_path / "whole" / "README.md").read_text(), "the run's"
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole").state_dict()
    base = AutoModelForImageTextToText.from_pretrained(tiny_qwen3)
    plain = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    theirs = PeftModel.from_pretrained(base, run / "adapter").merge_and_unload().state_dict()
    assert whole.keys() == theirs.keys()
    torch.testing.assert_close(whole, theirs, rtol=1e-5, atol=1e-6)
    changed = [name for name in plain if not torch.equal(plain[name], whole[name])]
    assert len(changed) == 11 and any(".deepstack_merger_list.1." in name for name in changed)


@pytest.mark.slow
def test_in_half_precision_and_four_bits(
    tmp_path: Path, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that the adapter was trained on, not those before they were rounded; never more than a shard."""
    pytest.importorskip("bitsandbytes")
    base = sharded(tiny_models["qwen3_vl"], tmp_path / "base")
    sizes: list[int] = []

    def save(tensors: dict[str, torch.Tensor], *more: Any, **named: Any) -> None:
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, *more, **named)

    monkeypatch.setattr(merging, "save_file", save)
    for name, changes in (("half", {"precision": "bf16"}), ("four", {"base_format": "nf4", "precision": "bf16"})):
        (tmp_path / name).mkdir()
        run = trained(tmp_path / name, base, ON_CPU, **SHORT, **changes).run
        said = merged(run, tmp_path / name / "whole")
        assert "bf16 rounds what the adapter changes by " in said
        assert len(sizes) > 2 and max(sizes) <= 200_000, "shard by shard"
        whole = AutoModelForImageTextToText.from_pretrained(tmp_path / name / "whole")
        assert whole.dtype == torch.bfloat16
        assert "nf4" not in (tmp_path / name / "whole/README.md").read_text()
        adapter = load_file(run / "adapter/adapter_model.safetensors")
        layer = "model.language_model.layers.1.self_attn.q_proj"
        a, b = (adapter[f"base_model.model.{layer}.lora_{which}.weight"] for which in "AB")
        plain = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.bfloat16)
        weight = plain.get_submodule(layer).weight.data
        if name == "four":
            from bitsandbytes.functional import dequantize_4bit, quantize_4bit

            weight = dequantize_4bit(*quantize_4bit(weight, quant_type="nf4", compress_statistics=False))
        expected = (weight.float() + 2.0 * b @ a).bfloat16()
        assert torch.equal(whole.get_submodule(layer).weight.data, expected), name
        if name == "four":
            for linear in (each for n, each in plain.named_modules() if isinstance(each, nn.Linear) and n != "lm_head"):
                coded = quantize_4bit(linear.weight.data, quant_type="nf4", compress_statistics=False)
                linear.weight.data = dequantize_4bit(*coded)
        # In float32, so that nothing but the one rounding of what was merged lies between the two.
        before, found = logits(plain.float(), TOKENS), logits(whole.float(), TOKENS)
        theirs = PeftModel.from_pretrained(plain, run / "adapter")
        apart = logits(theirs, TOKENS)
        assert (found - apart).norm() < min(0.03 * apart.norm(), 0.5 * (apart - before).norm()), name
        merged_by_peft = theirs.merge_and_unload()
        for weight in merged_by_peft.parameters():
            weight.data = weight.data.bfloat16().float()
        torch.testing.assert_close(found, logits(merged_by_peft, TOKENS), rtol=1e-3, atol=1e-3)
        sizes.clear()


def test_a_checkpoint_that_the_run_removes_meanwhile(
    tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, tiny_qwen3, ON_CPU | {"save_steps": 1}, **SHORT).run
    whole, fill, names = RunFolder.read(run).checkpoints, command._fill, list[str]()

    def removed(setup: Any, weights: Path, folder: Path) -> None:
        names.append(weights.name)
        if len(names) == 1:  # as the run does, which has a newer one by then
            weights.rename(whole / "step-000003")
        fill(setup, weights, folder)

    monkeypatch.setattr(command, "_fill", removed)
    said = merged(run, tmp_path / "a/new/folder", "--checkpoint", "last")
    assert names == ["step-000002", "step-000003"]
    lines = said.splitlines()
    assert [line for line in lines if "--checkpoint" in line] == [f"--checkpoint last is {name}" for name in names]
    assert lines[-1] == f"written: {tmp_path / 'a/new/folder'}" and checkpoint.fault(tmp_path / "a/new/folder") is None


def test_a_disk_without_room_for_the_model(tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path, tiny_qwen3, ON_CPU, **SHORT).run
    size = sum(each.nbytes for each in load_file(tiny_qwen3 / merging.SINGLE).values())
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(RunStopped) as stop:
        merged(run, tmp_path / "w")
    assert stop.value.code == EXIT_DISK_FULL and str(stop.value) == (
        f"no room for the merged model in {tmp_path}: No space left on device. It takes about {size:,} bytes and 1,000 "
        f"are free: {size - 1000:,} bytes are missing."
    )
    monkeypatch.undo()

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(merging, "save_file", full)
    with pytest.raises(RunStopped, match="no room for the merged model in ") as stop:
        merged(run, tmp_path / "w")
    assert stop.value.code == EXIT_DISK_FULL and not [each for each in tmp_path.iterdir() if "w" in each.name[:3]]


def test_a_head_with_the_embeddings_weights(
    tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """Its adapter trains, and is not merged into the embedding; which is known before weights are read."""
    base = shutil.copytree(tiny_qwen3, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(base / merging.SINGLE)
    untied = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(untied, base / merging.SINGLE, metadata={"format": "pt"})
    run = trained(tmp_path, base, ON_CPU, max_steps=2, lora={"r": 2, "target_modules": ["q_proj", "lm_head"]}).run
    assert (
        "lora.target_modules: lm_head has the embedding's weights in this model (tie_word_embeddings): its adapter "
        "changes the lm_head alone, and `sameday merge` will refuse it, because merged weights would change both"
    ) in capsys.readouterr().out
    assert not [each for each in recwarn if "tie_word_embeddings" in str(each.message)]
    with pytest.raises(BadInput) as error:
        merged(run, tmp_path / "w")
    assert str(error.value) == (
        f"{run}/adapter: changes lm_head, which has the embedding's weights in {base} (tie_word_embeddings): merged "
        "into them, it would change the embedding too; allowed: the adapter as it is, by PEFT, or one without lm_head"
    )
    assert not (tmp_path / "w").exists() and not list(tmp_path.glob(".writing*"))


def test_what_cannot_be_merged(tmp_path: Path, tiny_qwen3: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in tiny_qwen3.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    run = trained(tmp_path, base, ON_CPU, **SHORT).run
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()

    def refused(*words: str) -> str:
        with pytest.raises(BadInput) as error:
            merged(*map(Path, words[:2]), *words[2:])
        return str(error.value)

    assert refused(f"{run}", f"{tmp_path}/there") == f"-o {tmp_path}/there: is there already, and is not overwritten"
    below = f"{tmp_path}/there/file/w"
    assert refused(f"{run}", below) == f"-o {below}: cannot be a folder: Not a directory; choose another one"
    assert "has no such checkpoint as step-9" in refused(f"{run}", f"{tmp_path}/w", "--checkpoint", "step-9")
    assert "is not a run folder" in refused(f"{tmp_path}/there", f"{tmp_path}/w")
    tensors = load_file(base / merging.SINGLE)
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name] + 1}, base / merging.SINGLE, metadata={"format": "pt"})
    said = refused(f"{run}", f"{tmp_path}/w")
    assert "was trained on another base model: its weights were not those of " in said
    save_file({k: v for k, v in tensors.items() if k != name}, base / merging.SINGLE, metadata={"format": "pt"})
    assert refused(f"{run}", f"{tmp_path}/w") == f"the base model's files lack {name}"
    (base / merging.SINGLE).write_bytes(b"not weights")
    assert f"{base / merging.SINGLE}: cannot be read: " in refused(f"{run}", f"{tmp_path}/w")
    (base / merging.SINGLE).unlink()
    assert "weights in other files cannot be merged" in refused(f"{run}", f"{tmp_path}/w")
    assert not list(tmp_path.glob("w")) and not list(tmp_path.glob(".writing*"))
