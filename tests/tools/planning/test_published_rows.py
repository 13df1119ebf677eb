"""The planner's formulas give the published figures of papers and other systems."""

import formulas
import pytest
from formulas import (
    approximate_days,
    approximate_parameters,
    end_activations,
    full_recompute_flops,
    interleaving_factor,
    layer_activations,
    model_flops,
    model_state_bytes,
    most_loaded_shard,
    parameters,
    selective_recompute_flops,
    training_days,
)

from megatron.config.model import padded_vocabulary
from megatron.parallel.pipeline.simulation import bubble, bubble_ratio

GB, MIB, GIB, TERA, PETA = 1e9, 2**20, 2**30, 1e12, 1e15

# arXiv 2104.04473, table 1: parameters in billions, heads, hidden, layers, TP, PP, GPUs, batch, TFLOP/s of a GPU,
# PFLOP/s of all.
WEAK_SCALING = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 4.4),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 8.8),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 18.2),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 34.6),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 70.8),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 143.8),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 227.1),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 297.4),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 410.2),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 502.0),
]


@pytest.mark.parametrize(
    ("layers", "hidden", "count"),
    [(12, 768, 124_439_808), (24, 1024, 354_823_168), (36, 1280, 774_030_080), (48, 1600, 1_557_611_200)],
)
def test_parameters_of_gpt2(layers, hidden, count):
    assert parameters(layers, hidden, 50257, 1024) == count


@pytest.mark.parametrize(("t", "padded"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_padded_vocabulary(t, padded):
    assert padded_vocabulary(50257, t) == padded


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_model_states_of_zero_figure_1(stage, gigabytes):
    assert model_state_bytes(7.5e9, 64, stage) / GB == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("size", "owners", "row"),
    [
        (7.5e9, 1, (120, 120, 120)),
        (7.5e9, 4, (52.5, 41.3, 30)),
        (7.5e9, 16, (35.6, 21.6, 7.5)),
        (7.5e9, 64, (31.4, 16.6, 1.88)),
        (7.5e9, 256, (30.4, 15.4, 0.47)),
        (7.5e9, 1024, (30.1, 15.1, 0.12)),
        (128e9, 4, (896, 704, 512)),
        (128e9, 16, (608, 368, 128)),
        (128e9, 64, (536, 284, 32)),
        (128e9, 1024, (513, 257, 2)),
        (1e12, 4, (7000, 5500, 4000)),
        (1e12, 64, (4187, 2218, 250)),
        (1e12, 1024, (4011, 2013, 15.6)),
    ],
)
def test_model_states_of_zero_table_1(size, owners, row):
    tolerance = 0.06 if size < 1e11 else 1
    assert [model_state_bytes(size, owners, stage) / GB for stage in (1, 2, 3)] == pytest.approx(row, abs=tolerance)


@pytest.mark.parametrize("row", WEAK_SCALING, ids=lambda row: f"{row[0]}B")
def test_parameters_and_aggregate_rate_of_weak_scaling(row):
    billions, _, hidden, layers, _, _, gpus, _, teraflops, petaflops = row
    assert round(approximate_parameters(layers, hidden, 51200, 2048) / 1e9, 1) == billions
    assert parameters(layers, hidden, 51200, 2048) == pytest.approx(billions * 1e9, abs=0.06e9)
    assert teraflops * gpus * TERA / PETA == pytest.approx(petaflops, rel=0.004)


@pytest.mark.parametrize(
    ("size", "tokens", "gpus", "teraflops", "days"), [(175e9, 300e9, 1024, 140, 34), (1008e9, 450e9, 3072, 163, 84)]
)
def test_training_time(size, tokens, gpus, teraflops, days):
    assert round(approximate_days(tokens, size, gpus, teraflops * TERA)) == days


@pytest.mark.parametrize(
    ("size", "layers", "hidden", "rows"),
    [
        (174.6e9, 96, 12288, [(384, 153, 84, 82.6), (768, 149, 43, 42.4), (1536, 141, 23, 22.4)]),
        (529.6e9, 105, 20480, [(560, 171, 156, 153.6), (1120, 167, 80, 78.7), (2240, 159, 42, 41.3)]),
        (174.6e9, 96, 12288, [(384, 144, 90, None)]),
    ],
)
def test_days_for_300_billion_tokens(size, layers, hidden, rows):
    per_token = full_recompute_flops(1, 2048, layers, hidden, 51200) / 2048
    for gpus, teraflops, days, approximate in rows:
        assert training_days(300e9, per_token, gpus, teraflops * TERA) == pytest.approx(days, abs=1)
        if approximate:
            assert approximate_days(300e9, size, gpus, teraflops * TERA) == pytest.approx(approximate, rel=0.002)


@pytest.mark.parametrize(
    ("heads", "hidden", "b", "mebibytes"),
    [
        (64, 6144, 4, (6752, 1264, 844, 624, 204, 96)),
        (96, 12288, 1, (2736, 552, 342, 312, 102, 48)),
        (128, 20480, 1, (3920, 840, 490, 520, 170, 80)),
        (160, 25600, 1, (4900, 1050, 612.5, 650, 212.5, 100)),
    ],
    ids=["22B", "175B", "530B", "1T"],
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


def test_activations_by_those_of_tensor_parallelism_alone():
    """The paper's five times less, and the scores that selective recomputation leaves out."""
    alone = layer_activations(2048, 1, 12288, 96, 8)
    both = {"sequence_parallel": True, "recompute": "selective"}
    ways = [{"sequence_parallel": True}, {"recompute": "selective"}, both]
    shares = [layer_activations(2048, 1, 12288, 96, 8, **way) / alone for way in ways]
    assert shares == pytest.approx([0.62, 0.565, 0.185], abs=0.002)


@pytest.mark.parametrize(
    ("heads", "hidden", "layers", "scores", "less", "more_flops"),
    [(96, 12288, 96, 80, 0.70, 0.027), (128, 20480, 105, 64, 0.65, 0.016)],
    ids=["GPT-3", "MT-NLG"],
)
def test_selective_recomputation(heads, hidden, layers, scores, less, more_flops):
    whole = layer_activations(2048, 1, hidden, heads)
    selective = layer_activations(2048, 1, hidden, heads, recompute="selective")
    assert (whole - selective) / (2048 * hidden) == scores
    assert 1 - selective / whole == pytest.approx(less, abs=0.005)
    sizes = (1, 2048, layers, hidden, 51200)
    assert selective_recompute_flops(*sizes) / model_flops(*sizes) - 1 == pytest.approx(more_flops, abs=0.001)


@pytest.mark.parametrize(
    ("layers", "hidden", "gpus", "batch", "seconds", "mfu", "hfu"),
    [
        (48, 6144, 8, 4, 1.10, 41.7, 43.8),
        (96, 12288, 64, 64, 13.75, 51.4, 52.8),
        (105, 20480, 280, 280, 37.83, 56.0, 57.0),
        (128, 25600, 512, 512, 71.49, 56.3, 57.0),
    ],
    ids=["22B", "175B", "530B", "1T"],
)
def test_utilization_of_selective_recomputation(layers, hidden, gpus, batch, seconds, mfu, hfu):
    peak = gpus * 312 * TERA * seconds / 100
    sizes = (batch, 2048, layers, hidden, 51200)
    assert model_flops(*sizes) / peak == pytest.approx(mfu, abs=0.3)
    assert selective_recompute_flops(*sizes) / peak == pytest.approx(hfu, abs=0.3)


def test_interleaving_raises_activations_of_the_first_stage():
    assert interleaving_factor(8, 3) == pytest.approx(1.2917, abs=5e-5)
    layer = layer_activations(2048, 1, 12288, 96, 8, sequence_parallel=True, recompute="selective")
    assert 96 * layer / GIB == pytest.approx(9.56, abs=0.005)
    assert 96 * layer * interleaving_factor(8, 3) / GIB == pytest.approx(12.35, abs=0.005)


@pytest.mark.parametrize(
    ("sizes", "layout", "bytes_of_parameter", "states", "activations"),
    [
        ((96, 12288, 96, 51200, 2048, 1), (8, 8, 3), 18, 46.89, 12.38),
        ((24, 1024, 16, 50304, 1024, 4), (1, 1, 1), 18, 5.928, 3.975),
        ((24, 1024, 16, 50304, 1024, 4), (2, 2, 1), 6 + 12 / 2, 1.132, 1.598),
    ],
    ids=["175B, TP 8 x PP 8, interleaved", "345M on one", "345M, TP 2 x PP 2 x DP 2"],
)
def test_theoretical_memory_of_megatron(sizes, layout, bytes_of_parameter, states, activations):
    """Its report counts neither biases nor positions, and 8 bytes of each token and stage for what goes in."""
    layers, hidden, heads, vocabulary, sequence, b = sizes
    t, p, v = layout
    tolerance = 0.005 if states > 10 else 0.0005
    shard = most_loaded_shard(layers, hidden, vocabulary, t, p)
    assert bytes_of_parameter * shard / GIB == pytest.approx(states, abs=tolerance)
    layer = layer_activations(sequence, b, hidden, heads, t, sequence_parallel=True, recompute="selective")
    inputs = 8 * sequence * b * p / t
    factor = interleaving_factor(p, v) if v > 1 else 1
    dropout = sequence * b * hidden * p / t
    head = end_activations(sequence, b, hidden, vocabulary, p, t) - dropout
    assert ((layers * layer + inputs + dropout) * factor + head) / GIB == pytest.approx(activations, abs=tolerance)


def test_theoretical_memory_of_megatron_without_sequence_parallelism():
    """Its other report adds a twentieth, and cuts the two ends over no ranks."""
    layer = layer_activations(1024, 4, 1024, 16, 2, recompute="selective")
    ends = 8 * 1024 * 4 * 2 + 1024 * 4 * 1024 * 2
    assert 1.05 * (24 * layer + ends) / GIB == pytest.approx(2.174, abs=0.001)


@pytest.mark.parametrize(
    ("p", "m", "v", "of_ideal", "of_total"),
    [
        (4, 4, 1, 0.75, 0.4286),
        (4, 8, 1, 0.375, 0.2727),
        (4, 8, 2, 0.1875, 0.1579),
        (8, 32, 1, 0.2188, 0.1795),
        (8, 32, 2, 0.1094, 0.0986),
        (2, 8, 1, 0.125, 0.1111),
        (64, 512, 1, 0.1230, 0.1096),
    ],
)
def test_bubble(p, m, v, of_ideal, of_total):
    assert bubble_ratio(p, m, v) == pytest.approx(of_ideal, abs=1e-4)
    assert bubble(p, m, v) == pytest.approx(of_total, abs=1e-4)


def test_trillion_parameters_on_4096_devices():
    """DeepSpeed's example of 3D parallelism: TP 8 x PP 64 x DP 8."""
    assert model_state_bytes(1e12 / (8 * 64), 8, 0) / GB == pytest.approx(31.25)
    assert 12 * 298 * 17408**2 / 1e12 == pytest.approx(approximate_parameters(298, 17408, 51200, 2048) / 1e12, rel=2e-3)
    assert approximate_parameters(298, 17408, 0, 0) == pytest.approx(1.0837e12, rel=1e-3)


def test_gpt2_of_1_5_billion_parameters():
    """ZeRO's example: 24 GB of states, and 12 numbers of 16 bits for each hidden state of each layer."""
    assert model_state_bytes(1.5e9, 1, 0) / GB == 24
    assert formulas.zero_activations(1024, 32, 1600, 48) / GB == pytest.approx(60.4, abs=0.05)
    kept = 48 * layer_activations(1024, 32, 1600, 25, recompute="full") + formulas.zero_activations(1024, 32, 1600, 1)
    assert kept / GB == pytest.approx(8, rel=0.25)


@pytest.mark.parametrize(("gpus", "seconds", "teraflops"), [(2240, 60.1, 126), (2800, 50.2, 121), (3360, 44.4, 113)])
def test_rate_of_530_billion_parameters(gpus, seconds, teraflops):
    rate = full_recompute_flops(1920, 2048, 105, 20480, 51200) / gpus / seconds / TERA
    assert rate == pytest.approx(teraflops, abs=0.7)
