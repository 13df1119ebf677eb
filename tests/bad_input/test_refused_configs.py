"""Errors of the DeepSpeed JSON: one line each, before torch is imported."""

from pathlib import Path

import pytest
from support.refusals import refusal

# Problem: the file's text, flags, and the expected lines.
CONFIGS: dict[str, tuple[str, str, list[str]]] = {
    "no file": ("", "--deepspeed_config none.json", ["--deepspeed_config none.json: No such file or directory"]),
    "a folder": ("", "--deepspeed_config ck", ["--deepspeed_config ck: Is a directory"]),
    "empty": ("", "", ["ds.json, line 1, column 1: not JSON: Expecting value"]),
    "a list": ("[1]", "", ["ds.json: must hold a JSON object, which begins with an opening brace"]),
    "null": ("null", "", ["ds.json: must hold a JSON object, which begins with an opening brace"]),
    "a comma too many": (
        '{"gradient_clipping": 1.0,\n}',
        "",
        ["ds.json, line 2, column 1: not JSON: Expecting property name enclosed in double quotes"],
    ),
    "a comment": (
        '{\n  // ZeRO\n  "steps_per_print": 1\n}',
        "",
        ["ds.json, line 2, column 3: not JSON: Expecting property name enclosed in double quotes"],
    ),
    "a misspelt key": (
        '{"zero_optimisation": {"stage": 1}}',
        "",
        ["ds.json, line 1: zero_optimisation: unknown key, did you mean zero_optimization?"],
    ),
    "a misspelt key within a section": (
        '{"zero_optimization": {\n"stag": 1}}',
        "",
        ["ds.json, line 2: zero_optimization.stag: unknown key, did you mean stage?"],
    ),
    "a key twice": (
        '{"gradient_clipping": 1.0,\n "gradient_clipping": 2.0}',
        "",
        ["ds.json, line 2: gradient_clipping was already given in line 1"],
    ),
    "a section that is none": (
        '{"zero_optimization": true}',
        "",
        ["ds.json, line 1: zero_optimization: true must be an object"],
    ),
    "a word for a number": (
        '{"train_batch_size": "8"}',
        "",
        ['ds.json, line 1: train_batch_size: "8" must be a whole number from 1 on'],
    ),
    "negative": (
        '{"gradient_clipping": -1}',
        "",
        ["ds.json, line 1: gradient_clipping: -1 must be a number from 0 on"],
    ),
    "ZeRO 4": (
        '{"zero_optimization": {"stage": 4}}',
        "",
        ["ds.json, line 1: zero_optimization.stage: 4 must be one of 0, 1, 2, 3"],
    ),
    "an optimizer that there is not": (
        '{"optimizer": {"type": "Adm"}}',
        "",
        [
            'ds.json, line 1: optimizer.type: "Adm" must be one of Adam, AdamW, Adagrad, Lamb, Lion, SGD, Muon, '
            "Adafactor"
        ],
    ),
    "a scheduler": (
        '{"scheduler": {"type": "WarmupLR"}}',
        "",
        [
            "ds.json, line 1: scheduler: the learning-rate schedule is set on the command line: use --lr, --min-lr, "
            "--lr-decay-style, --lr-decay-iters and --warmup"
        ],
    ),
    "a batch that does not add up": (
        '{"train_batch_size": 7}',
        "",
        [
            "train_batch_size 7 in ds.json is not a multiple of --batch-size 2 x data-parallel size 1 = 2: "
            "set a global batch of 6 or 8"
        ],
    ),
    "another value than the flag's": (
        '{"gradient_clipping": 2.0}',
        "--clip-grad 1.0",
        [
            "--clip-grad 1.0 and gradient_clipping 2.0 in ds.json contradict each other: delete gradient_clipping from "
            "the file to use the flag, or delete the flag"
        ],
    ),
    "fp16 on the CPU": (
        '{"fp16": {"enabled": true}}',
        "",
        ["--fp16 does not work on the CPU: use --bf16, or neither for fp32"],
    ),
    "weights offloaded without ZeRO 3": (
        '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',
        "",
        ["--offload-param needs --zero-stage 3: add it, or remove --offload-param"],
    ),
    "NVMe without a place": (
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}',
        "",
        ["--offload-optimizer nvme needs --nvme-path: add it, or remove --offload-optimizer nvme"],
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_file_is_refused(place: Path, case: str) -> None:
    text, words, lines = CONFIGS[case]
    (place / "ds.json").write_text(text)
    assert refusal(place, f"--deepspeed_config ds.json {words}") == (2, lines)
