"""MaskSpec and AttentionSpec: the window arguments and the band say the same."""

import itertools

import pytest

from flash_inductor.spec import AttentionSpec, MaskSpec


@pytest.mark.parametrize("lower,upper", itertools.product([None, -5, 0, 3], [None, -2, 0, 4, 7]))
def test_band_to_window_and_back(lower: int | None, upper: int | None) -> None:
    band = MaskSpec(lower, upper)
    if lower is not None and upper is not None and lower > upper:
        with pytest.raises(ValueError, match="sees nothing"):
            band.to_window()
        return
    kwargs = band.to_window()
    assert MaskSpec.from_window(**kwargs) == band
    for side in ("window_left", "window_right"):
        assert kwargs.get(side, 0) >= 0


def test_common_bands_use_the_plain_arguments() -> None:
    assert MaskSpec(None, 0).to_window() == {"is_causal": True}
    assert MaskSpec(-7, 0).to_window() == {"window_left": 7, "is_causal": True}
    assert MaskSpec(-3, 5).to_window() == {"window_left": 3, "window_right": 5}
    assert MaskSpec(None, -1).to_window() == {"diagonal": -1, "is_causal": True}


def test_intersection_is_the_tighter_band() -> None:
    assert MaskSpec(None, 0) & MaskSpec(-7, 3) == MaskSpec(-7, 0)


def test_spec_refuses_a_softcap_that_is_not_positive() -> None:
    with pytest.raises(ValueError, match="softcap"):
        AttentionSpec(softcap=0.0)


def test_description_reads_as_words() -> None:
    assert AttentionSpec(0.125, MaskSpec(-7, 0), 50.0).describe() == "causal, window 7, softcap 50, scale 0.125"
