"""What a merge may be asked for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from loraplex.adapters.merging.wish import MAX_MERGED, Combination, MergeWish, parse_weighted
from loraplex.errors import InvalidRequestError

PAIR = (("a", 0.5), ("b", 0.5))


@pytest.mark.parametrize(
    ("param", "settings"),
    [
        ("adapters", {"adapters": ()}),
        ("adapters", {"adapters": tuple((f"a{index}", 1.0) for index in range(MAX_MERGED + 1))}),
        ("adapters", {"adapters": (("a", 1.0), ("a", 2.0))}),
        ("adapters", {"adapters": (("a", float("nan")),)}),
        ("adapters", {"adapters": (("a", float("-inf")), ("b", 1.0))}),
        ("combination_type", {"combination_type": "average"}),
        ("combination_type", {"combination_type": "ties", "adapters": (("a", 1.0),), "density": 0.5}),
        ("density", {"combination_type": "ties"}),
        ("density", {"combination_type": "dare_linear", "density": 0.0}),
        ("density", {"combination_type": "ties", "density": 1.1}),
        ("density", {"combination_type": "ties", "density": float("nan")}),
        ("density", {"combination_type": "linear", "density": 0.5}),
        ("density", {"density": 0.5}),
        ("majority_sign_method", {"combination_type": "ties", "density": 0.5, "majority_sign_method": "loud"}),
        ("majority_sign_method", {"combination_type": "dare_linear", "density": 0.5, "majority_sign_method": "total"}),
        ("svd_rank", {"svd_rank": 0}),
        ("svd_rank", {"svd_rank": 513}),
        ("svd_rank", {"combination_type": "cat", "svd_rank": 4}),
        ("svd_clamp", {"svd_clamp": 0.0}),
        ("svd_clamp", {"combination_type": "linear", "svd_clamp": 0.9}),
        ("seed", {"seed": 1}),
        ("seed", {"combination_type": "dare_ties", "density": 0.5, "seed": -1}),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_by_its_field(param: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        MergeWish(**{"adapters": PAIR, **settings})
    assert caught.value.param == param
    assert param in str(caught.value)


def test_the_combination_is_pefts_by_default() -> None:
    assert MergeWish(adapters=PAIR).combination is Combination.SVD
    assert MergeWish(adapters=(("a", 2.0),)).combination is Combination.LINEAR


def test_weights_on_the_command_line() -> None:
    assert parse_weighted("a=b/sql=-0.5") == ("a=b/sql", -0.5)
    for text in ("sql", "=1", "sql=", "sql=much"):
        with pytest.raises(InvalidRequestError, match="PATH=WEIGHT"):
            parse_weighted(text)


def test_a_wish_needs_no_torch() -> None:
    code = "import sys, loraplex.adapters.merging.wish, loraplex.frontend.making; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
