"""Merges against peft's `add_weighted_adapter`, on the files that peft saved."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open

from loraplex.adapters.merging import combine
from loraplex.adapters.merging.merge import plan_merge, run_merge
from loraplex.adapters.merging.outline import Origin
from loraplex.adapters.merging.wish import MergeWish
from loraplex.adapters.merging.written import write_directory
from loraplex.adapters.source import AdapterSource
from loraplex.errors import (
    AdapterBaseMismatchError,
    AdapterTooLargeError,
    AdapterValidationError,
    LoraplexError,
    RequestAbortedError,
)
from tests.adapters.peft_oracle import (
    LINEARS,
    all_targets_of,
    base_state,
    edit_config,
    load,
    lora_layers,
    make_adapter,
    new_base,
    peft_reads,
    read_config,
    read_tensors,
    save_kind,
    targets_of,
    tuned_layers,
    write_tensors,
)

ROOM = 2**30


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of the same base: `first`, `second` of one rank, `rslora`, `wide` of another rank on fewer modules."""
    folder = tmp_path_factory.mktemp("merged")
    make_adapter(folder / "first", target_modules=list(LINEARS), r=4, lora_alpha=6)
    make_adapter(folder / "second", target_modules=list(LINEARS), r=4, lora_alpha=10)
    make_adapter(folder / "rslora", target_modules=["q_proj", "down_proj"], r=4, lora_alpha=2, use_rslora=True)
    make_adapter(folder / "wide", target_modules=["k_proj", "down_proj"], r=6, lora_alpha=3)
    for seed, name in enumerate(("first", "second", "rslora", "wide")):
        generator = torch.Generator().manual_seed(seed)
        tensors = read_tensors(folder / name)
        write_tensors(
            folder / name, {key: torch.randn(each.shape, generator=generator) * 0.3 for key, each in tensors.items()}
        )
    return folder


def origin(path: Path) -> Origin:
    return Origin(path.name, str(path), AdapterSource())


def merged(saved: Path, out: Path, wish: MergeWish) -> Path:
    plan = plan_merge([origin(saved / name) for name, _ in wish.adapters], wish, ROOM)
    made = run_merge(plan, ROOM)
    assert made.nbytes <= plan.nbytes
    write_directory(made, out)
    load(out, targets_of(new_base("llama")))  # as the base model would
    return out


def oracle(saved: Path, wish: MergeWish, ends: bool = False) -> dict[str, Any]:
    """peft's layers with the adapter `merged`; ends: of an embedding, too."""
    names, weights = zip(*wish.adapters, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(new_base("llama"), str(saved / names[0]), adapter_name=names[0])
        for name in names[1:]:
            model.load_adapter(str(saved / name), adapter_name=name)
        torch.manual_seed(wish.seed or 0)
        state = torch.get_rng_state()
        inject = model.base_model.inject_adapter

        @functools.wraps(inject)
        def inject_and_reseed(*args: Any, **kwargs: Any) -> Any:
            """peft draws the new adapter's A before it merges; the draws of the merge are to come first."""
            result = inject(*args, **kwargs)
            torch.set_rng_state(state)
            return result

        model.base_model.inject_adapter = inject_and_reseed
        model.add_weighted_adapter(
            list(names),
            list(weights),
            "merged",
            wish.combination.value,
            svd_rank=wish.svd_rank,
            svd_clamp=wish.svd_clamp,
            density=wish.density,
            majority_sign_method=wish.majority_sign_method or "total",
        )
    return {
        name: layer
        for name, layer in lora_layers(model).items()
        if "merged" in layer.lora_A or (ends and "merged" in layer.lora_embedding_A)
    }


def wish_of(combination: str, *adapters: tuple[str, float], **settings: Any) -> MergeWish:
    given = adapters or (("first", 0.7), ("second", -0.4))
    return MergeWish(adapters=given, combination_type=combination, **settings)


FACTORS = [
    wish_of("linear"),
    wish_of("linear", ("first", 2.5)),
    wish_of("cat"),
    wish_of("cat", ("second", 1.0), ("first", -3.0)),
    wish_of("ties", density=0.4),
    wish_of("ties", density=0.4, majority_sign_method="frequency"),
    wish_of("ties", density=1.0),
    wish_of("magnitude_prune", density=0.3),
    wish_of("dare_linear", density=0.6, seed=5),
    wish_of("dare_ties", density=0.6, seed=6),
    wish_of("dare_ties", density=0.6, majority_sign_method="frequency"),
]
PRODUCTS = [
    wish_of("svd"),
    wish_of("svd", svd_rank=2),
    wish_of("svd", svd_rank=16),
    wish_of("svd", ("first", 0.5), ("wide", 0.5)),
    wish_of("svd", ("first", 1.0), ("second", 1.0), ("wide", 1.0), ("rslora", 1.0), svd_rank=15),
    wish_of("svd", svd_rank=3, svd_clamp=0.9),
    wish_of("ties_svd", density=0.4),
    wish_of("ties_svd", density=0.4, majority_sign_method="frequency", svd_rank=5),
    wish_of("dare_linear_svd", density=0.7, seed=9),
    wish_of("dare_ties_svd", density=0.7, seed=9),
    wish_of("magnitude_prune_svd", density=0.2, svd_rank=1),
    wish_of("cat", ("first", 0.5), ("wide", 0.5)),
]


def shown(wish: MergeWish) -> str:
    return f"{wish.combination}-{len(wish.adapters)}-{wish.density}-{wish.svd_rank}-{wish.svd_clamp}"


@pytest.mark.parametrize("wish", FACTORS, ids=shown)
def test_a_and_b_equal_pefts(saved: Path, tmp_path: Path, wish: MergeWish) -> None:
    found = read_tensors(merged(saved, tmp_path / "out", wish))
    layers = oracle(saved, wish)
    assert len(found) == 2 * len(layers) == 2 * 7 * 3
    for name, layer in layers.items():
        for part, wanted in (("lora_A", layer.lora_A["merged"]), ("lora_B", layer.lora_B["merged"])):
            ours = found[f"base_model.model.{name}.{part}.weight"]
            torch.testing.assert_close(ours, wanted.weight.detach(), atol=1e-6, rtol=1e-6)
            assert ours.abs().max() > 0.1


@pytest.mark.parametrize("wish", PRODUCTS, ids=shown)
def test_products_equal_pefts(saved: Path, tmp_path: Path, wish: MergeWish) -> None:
    """Singular vectors have no sign of their own, and peft fills ranks that a module has not with zeros."""
    out = merged(saved, tmp_path / "out", wish)
    ours = tuned_layers(peft_reads(out))
    layers = oracle(saved, wish)
    assert ours.keys() == layers.keys()
    for name, layer in layers.items():
        wanted = layer.get_delta_weight("merged").detach().double()
        found = ours[name].get_delta_weight("default").detach()
        torch.testing.assert_close(found, wanted, atol=2e-5 * wanted.abs().max().item(), rtol=0)


@pytest.mark.parametrize("shape", [(200, 320), (320, 200)], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.4, 2.0])
@pytest.mark.parametrize("num_ranks", [1, 3, 6, 7])
def testmain_directions_are_those_of_the_whole_decomposition(
    shape: tuple[int, int], decay: float, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where singular values are close together, far apart, or none."""
    calls, whole = [], combine.all_directions
    monkeypatch.setattr(combine, "all_directions", lambda delta, rank: calls.append(rank) or whole(delta, rank))
    generator = torch.Generator().manual_seed(num_ranks)
    left, right = (torch.randn(side, 6, dtype=torch.float64, generator=generator) for side in shape)
    noise = torch.randn(shape, dtype=torch.float64, generator=generator) * 1e-3
    delta = (left * torch.exp(-decay * torch.arange(6.0))) @ right.T + (noise if num_ranks < 6 else 0)
    lora_a, lora_b = combine.main_directions(delta.float(), num_ranks)
    assert (lora_a.shape, lora_b.shape) == ((num_ranks, shape[1]), (shape[0], num_ranks))
    wanted_b, values, wanted_a = torch.linalg.svd(delta, full_matrices=False)
    wanted = wanted_b[:, :num_ranks] * values[:num_ranks] @ wanted_a[:num_ranks]
    torch.testing.assert_close(lora_b.double() @ lora_a.double(), wanted, atol=3e-7 * wanted.abs().max().item(), rtol=0)
    assert not calls


def test_directions_that_do_not_stand_out_take_a_whole_decomposition() -> None:
    delta = torch.randn(200, 260, generator=torch.Generator().manual_seed(0))
    for each in (delta, torch.eye(200), delta * 1e-30, torch.zeros(200, 260)):
        lora_a, lora_b = combine.main_directions(each, 5)
        left, values, right = torch.linalg.svd(each.double(), full_matrices=False)
        if each is delta:
            wanted = (left[:, :5] * values[:5] @ right[:5]).float()
            torch.testing.assert_close(lora_b @ lora_a, wanted, atol=2e-5 * wanted.abs().max().item(), rtol=0)
        assert (lora_b @ lora_a - each).norm().item() <= values[5:].norm().item() * 1.00001


def test_the_result_says_what_it_is_made_of_and_has_no_needless_rank(saved: Path, tmp_path: Path) -> None:
    out = merged(saved, tmp_path / "out", wish_of("cat", ("first", 0.5), ("wide", 0.25)))
    config, tensors = read_config(out), read_tensors(out)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 4, False)
    assert config["rank_pattern"] == config["alpha_pattern"]
    assert set(config["rank_pattern"].values()) == {10}
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (4, 32)
    with safe_open(out / "adapter_model.safetensors", "pt") as file:
        assert "cat: 0.5 * first" in file.metadata()["made_of"]
        assert "0.25 * wide" in file.metadata()["made_of"]
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize("kind", ["adalora", "loha", "lokr"])
def test_converted_kinds_are_merged_as_what_they_are_served_as(saved: Path, tmp_path: Path, kind: str) -> None:
    configs = {
        "adalora": peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"]),
        "loha": peft.LoHaConfig(r=2, alpha=3, target_modules=["q_proj"]),
        "lokr": peft.LoKrConfig(r=2, alpha=3, target_modules=["q_proj"]),
    }
    save_kind(tmp_path / kind, configs[kind])
    wish = wish_of("cat", (kind, 0.5), ("wide", 2.0))
    plan = plan_merge([origin(tmp_path / kind), origin(saved / "wide")], wish, ROOM)
    write_directory(run_merge(plan, ROOM), tmp_path / "out")
    found, single = tuned_layers(peft_reads(tmp_path / "out")), tuned_layers(peft_reads(tmp_path / kind))
    assert len(found) == 3 * 3
    for name, layer in single.items():
        wanted = 0.5 * layer.get_delta_weight("default")
        torch.testing.assert_close(found[name].get_delta_weight("default"), wanted, atol=1e-5, rtol=1e-5)


def test_a_merge_of_rslora_has_the_scaling_of_its_parts(saved: Path, tmp_path: Path) -> None:
    """peft keeps use_rslora of the first adapter, which multiplies its result by the root of the rank."""
    ours = tuned_layers(peft_reads(merged(saved, tmp_path / "out", wish_of("linear", ("rslora", 2.0)))))
    single = tuned_layers(peft_reads(saved / "rslora"))
    for name, layer in single.items():
        wanted = 2 * layer.get_delta_weight("default")
        torch.testing.assert_close(ours[name].get_delta_weight("default"), wanted, atol=1e-6, rtol=1e-5)


# ----------------------------------------------------------------------------------------- embeddings, heads and gains


ENDS = [
    wish_of("linear"),
    wish_of("cat"),
    wish_of("svd"),
    wish_of("svd", svd_rank=2),
    wish_of("ties", density=0.4),
    wish_of("dare_linear", density=0.6, seed=5),
    wish_of("dare_ties_svd", density=0.7, seed=9),
    wish_of("magnitude_prune_svd", density=0.2, svd_rank=3),
]


def save_ends(folder: Path, saved: bool = False) -> None:
    """`first`, `second`: of the embedding, the head and a linear; saved: with the base's weights, as peft saves."""
    for seed, name in enumerate(("first", "second")):
        make_adapter(folder / name, target_modules=["embed_tokens", "lm_head", "k_proj"], r=4, lora_alpha=6 + seed)
        generator, tensors = torch.Generator().manual_seed(seed), read_tensors(folder / name)
        made = {key: torch.randn(each.shape, generator=generator) * 0.3 for key, each in tensors.items()}
        if saved:
            weights = base_state("llama")
            made |= {
                f"base_model.model.{end}.base_layer.weight": weights[f"{end}.weight"]
                for end in ("model.embed_tokens", "lm_head")
            }
        write_tensors(folder / name, made)


@pytest.mark.parametrize("wish", ENDS, ids=shown)
def test_products_of_embeddings_and_heads_equal_pefts(tmp_path: Path, wish: MergeWish) -> None:
    save_ends(tmp_path)
    plan = plan_merge([origin(tmp_path / name) for name, _ in wish.adapters], wish, ROOM)
    write_directory(run_merge(plan, ROOM), tmp_path / "out")
    load(tmp_path / "out", all_targets_of(new_base("llama")))
    ours, layers = tuned_layers(peft_reads(tmp_path / "out")), oracle(tmp_path, wish, ends=True)
    assert ours.keys() == layers.keys() > {"model.embed_tokens", "lm_head"}
    for name, layer in layers.items():
        wanted = layer.get_delta_weight("merged").detach().double()
        found = ours[name].get_delta_weight("default").detach()
        torch.testing.assert_close(found, wanted, atol=2e-5 * wanted.abs().max().item(), rtol=0)


def test_saved_weights_of_embeddings_and_heads_are_kept(tmp_path: Path) -> None:
    save_ends(tmp_path, saved=True)
    wish = wish_of("cat")
    plan = plan_merge([origin(tmp_path / name) for name, _ in wish.adapters], wish, ROOM)
    made = run_merge(plan, ROOM)
    assert made.nbytes <= plan.nbytes
    for end in ("model.embed_tokens", "lm_head"):
        found = made.tensors[f"base_model.model.{end}.base_layer.weight"]
        assert torch.equal(found, base_state("llama")[f"{end}.weight"])
    write_directory(made, tmp_path / "out")
    load(tmp_path / "out", all_targets_of(new_base("llama")))
    tensors = read_tensors(tmp_path / "second")
    tensors["base_model.model.lm_head.base_layer.weight"][3, 5] += 1
    write_tensors(tmp_path / "second", tensors)
    plan = plan_merge([origin(tmp_path / name) for name, _ in wish.adapters], wish, ROOM)
    with pytest.raises(AdapterValidationError, match="saved weight of lm_head differs from another's"):
        run_merge(plan, ROOM)


def test_ia3_equals_pefts(tmp_path: Path) -> None:
    """A module that one of them does not have counts nothing of it, as in peft."""
    configs = {
        "first": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "second": peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
    }
    for seed, (name, config) in enumerate(configs.items()):
        save_kind(tmp_path / name, config)
        tensors = read_tensors(tmp_path / name)
        write_tensors(tmp_path / name, {key: each + seed for key, each in tensors.items()})
    for combination in (None, "linear"):
        wish = MergeWish(adapters=(("first", 0.7), ("second", -0.4)), combination_type=combination)
        plan = plan_merge([origin(tmp_path / name) for name in configs], wish, ROOM)
        made = run_merge(plan, ROOM)
        assert made.nbytes == plan.nbytes
        assert made.origin.startswith("linear: 0.7 * first")
    write_directory(made, tmp_path / "out")
    load(tmp_path / "out", targets_of(new_base("llama")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(new_base("llama"), str(tmp_path / "first"), adapter_name="first")
        model.load_adapter(str(tmp_path / "second"), adapter_name="second")
        model.base_model.add_weighted_adapter(["first", "second"], [0.7, -0.4], "merged")
    layers, ours = tuned_layers(model), tuned_layers(peft_reads(tmp_path / "out"))
    found = {name: layer for name, layer in layers.items() if "merged" in layer.ia3_l}
    assert found.keys() == ours.keys()
    for name, layer in found.items():
        assert ours[name].is_feedforward is layer.is_feedforward
        torch.testing.assert_close(ours[name].ia3_l["default"].float(), layer.ia3_l["merged"], atol=1e-6, rtol=1e-6)


def test_ia3_is_merged_by_linear_and_with_ia3_alone(saved: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_kind(tmp_path / name, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    wish = wish_of("ties", ("a", 1.0), ("b", 1.0), density=0.5)
    text = refused(AdapterValidationError, origin(tmp_path / "a"), origin(tmp_path / "b"), wish=wish)
    assert "linear alone, not by ties" in text
    wish = MergeWish(adapters=(("a", 1.0), ("first", 1.0)))
    text = refused(AdapterValidationError, origin(tmp_path / "a"), origin(saved / "first"), wish=wish)
    assert "peft_type LORA is not merged with IA3" in text


# ---------------------------------------------------------------------------------------------------------- refusals


def refused(kind: type[LoraplexError], *origins: Origin, wish: MergeWish, room: int = ROOM, rank: int = 512) -> str:
    with pytest.raises(kind) as caught:
        plan_merge(origins, wish, room, rank)
    return str(caught.value)


def test_what_cannot_be_merged_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    save_kind(tmp_path / "ia3", peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    save_kind(tmp_path / "vera", peft.VeraConfig(r=4, target_modules=["q_proj"]))
    saving = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    save_kind(tmp_path / "saved", saving)
    make_adapter(tmp_path / "dora", use_dora=True)
    make_adapter(tmp_path / "bdlora", use_bdlora={"target_modules_bd_b": ["q_proj", "v_proj"], "nblocks": 2})
    make_adapter(tmp_path / "biased", lora_bias=True, init_lora_weights=True)
    edit_config(make_adapter(tmp_path / "long").path, context_length=256)
    wish = wish_of("cat", ("first", 1.0), ("other", 1.0))
    make_adapter(tmp_path / "activated", alora_invocation_tokens=[3, 4], task_type="CAUSAL_LM")
    reasons = {
        "ia3": "peft_type IA3",
        "vera": "peft_type VERA",
        "saved": "modules_to_save: weights of an adapter's own",
        "dora": "use_dora",
        "bdlora": "use_bdlora: a sum of block-diagonal LoRAs is none",
        "biased": "lora_B.bias",
        "activated": "alora_invocation_tok",
        "long": "context_length: an adapter",
    }
    for name, reason in reasons.items():
        text = refused(AdapterValidationError, origin(saved / "first"), origin(tmp_path / name), wish=wish)
        assert name in text
        assert reason in text


def test_unequal_ranks_need_cat_or_svd(saved: Path) -> None:
    wish = wish_of("linear", ("first", 1.0), ("wide", 1.0))
    text = refused(AdapterValidationError, origin(saved / "first"), origin(saved / "wide"), wish=wish)
    assert "'first' has 4, 'wide' has 6; use cat or svd" in text


def test_bounds_are_checked_before_anything_is_read(saved: Path, tmp_path: Path) -> None:
    """The weights of the second are damaged: only a read would notice."""
    origins = origin(saved / "first"), origin(saved / "second")
    wish = wish_of("cat")
    assert "max_merge_bytes" in refused(AdapterTooLargeError, *origins, wish=wish, room=10_000)
    assert "rank 8, which is above max_lora_rank 7" in refused(AdapterTooLargeError, *origins, wish=wish, rank=7)
    tensors = read_tensors(saved / "second")
    (tmp_path / "nan").mkdir()
    edited = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    write_tensors(tmp_path / "nan", edited)
    (tmp_path / "nan" / "adapter_config.json").write_text((saved / "second" / "adapter_config.json").read_text())
    plan = plan_merge([origins[0], origin(tmp_path / "nan")], wish, ROOM)
    with pytest.raises(AdapterValidationError, match="NaN"):
        run_merge(plan, ROOM)


def test_adapters_of_other_bases_are_refused(saved: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "other", r=4)
    tensors = read_tensors(tmp_path / "other")
    edited = {name: torch.ones(4, 64) if "lora_A" in name else tensor for name, tensor in tensors.items()}
    write_tensors(tmp_path / "other", edited)
    wish = wish_of("cat", ("first", 1.0), ("other", 1.0))
    text = refused(AdapterBaseMismatchError, origin(saved / "first"), origin(tmp_path / "other"), wish=wish)
    assert "'first' and 'other'" in text


@pytest.mark.parametrize(("combination", "weight"), [("cat", 3e38), ("ties_svd", 3e38), ("svd", 3e38), ("svd", 1e308)])
def test_a_result_beyond_float32_is_refused(saved: Path, combination: str, weight: float) -> None:
    density = {"density": 0.5} if combination == "ties_svd" else {}
    wish = wish_of(combination, ("first", weight), ("second", weight), **density)
    plan = plan_merge([origin(saved / "first"), origin(saved / "second")], wish, ROOM)
    with pytest.raises(AdapterValidationError, match="does not fit in float32"):
        run_merge(plan, ROOM)


def test_progress_counts_to_the_end_and_a_cancel_is_seen_between_modules(saved: Path) -> None:
    plan = plan_merge([origin(saved / "first"), origin(saved / "second")], wish_of("linear"), ROOM)
    seen: list[tuple[int, int]] = []
    run_merge(plan, ROOM, lambda done, total: seen.append((done, total)))
    assert seen == [(done, 23) for done in range(24)]
    seen.clear()
    with pytest.raises(RequestAbortedError, match="cancelled"):
        run_merge(plan, ROOM, lambda done, total: seen.append((done, total)), lambda: len(seen) == 5)
    assert len(seen) == 5


def test_a_configuration_that_changed_is_content_that_changed(saved: Path, tmp_path: Path) -> None:
    from loraplex.errors import AdapterContentChangedError

    make_adapter(tmp_path / "sql", r=4)
    digest = load(tmp_path / "sql", targets_of(new_base("llama"))).adapter_digest
    sql = Origin("sql", str(tmp_path / "sql"), AdapterSource(), digest)
    run_merge(plan_merge([sql], wish_of("linear", ("sql", 1.0)), ROOM), ROOM)
    edit_config(tmp_path / "sql", lora_alpha=77)
    with pytest.raises(AdapterContentChangedError, match="'sql'"):
        run_merge(plan_merge([sql], wish_of("linear", ("sql", 1.0)), ROOM), ROOM)
