"""The formulas that the planner is compared with give the published figures of papers."""

import pytest
from formulas import full_recompute_flops, layer_activations, model_state_bytes, parameters

from megatron.config.model import padded_vocabulary
from megatron.parallel.pipeline.simulation import bubble, bubble_ratio

GB, MIB, TERA = 1e9, 2**20, 1e12


@pytest.mark.parametrize(
    ("layers", "hidden", "count"),
    [(12, 768, 124_439_808), (24, 1024, 354_823_168), (36, 1280, 774_030_080), (48, 1600, 1_557_611_200)],
)
def test_parameters_of_gpt2(layers, hidden, count):
    assert parameters(layers, hidden, 50257, 1024) == count


@pytest.mark.parametrize(("t", "padded"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_padded_vocabulary(t, padded):
    assert padded_vocabulary(50257, t) == padded


@pytest.mark.parametrize(
    ("size", "owners", "row"),
    [(7.5e9, 1, (120, 120, 120)), (7.5e9, 64, (31.4, 16.6, 1.88)), (1e12, 1024, (4011, 2013, 15.6))],
)
def test_model_states_of_zero_table_1(size, owners, row):
    tolerance = 0.06 if size < 1e11 else 1
    assert [model_state_bytes(size, owners, stage) / GB for stage in (1, 2, 3)] == pytest.approx(row, abs=tolerance)


@pytest.mark.parametrize(
    ("size", "layers", "hidden", "gpus", "teraflops", "days"),
    [("175B", 96, 12288, 1536, 141, 23), ("530B", 105, 20480, 2240, 159, 42)],
)
def test_days_for_300_billion_tokens(size, layers, hidden, gpus, teraflops, days):
    """arXiv 2104.04473, table 2."""
    seconds = 300e9 / 2048 * full_recompute_flops(1, 2048, layers, hidden, 51200) / (gpus * teraflops * TERA)
    assert seconds / 86400 == pytest.approx(days, abs=1)


@pytest.mark.parametrize(
    ("heads", "hidden", "b", "mebibytes"),
    [
        (64, 6144, 4, (6752, 1264, 844, 624, 204, 96)),
        (160, 25600, 1, (4900, 1050, 612.5, 650, 212.5, 100)),
    ],
    ids=["22B", "1T"],
)
def test_activations_of_a_layer(heads, hidden, b, mebibytes):
    ways = [
        {"t": 1},
        {"t": 8},
        {"t": 8, "sequence_parallel": True},
        {"t": 8, "recompute": "selective"},
        {"t": 8, "sequence_parallel": True, "recompute": "selective"},
        {"t": 8, "recompute": "full"},
    ]
    found = [layer_activations(2048, b, hidden, heads, **way) / MIB for way in ways]
    assert found == pytest.approx(list(mebibytes), rel=1e-12)


@pytest.mark.parametrize(
    ("p", "m", "v", "of_ideal", "of_total"),
    [(4, 8, 1, 0.375, 0.2727), (8, 32, 2, 0.1094, 0.0986), (64, 512, 1, 0.1230, 0.1096)],
)
def test_bubble(p, m, v, of_ideal, of_total):
    assert bubble_ratio(p, m, v) == pytest.approx(of_ideal, abs=1e-4)
    assert bubble(p, m, v) == pytest.approx(of_total, abs=1e-4)
