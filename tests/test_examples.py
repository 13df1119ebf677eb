"""The example programs: they run under a launcher and without one, and show what they promise."""

import re
import subprocess

from support.pages import ROOT
from support.programs import Programs


def test_a_small_model_is_trained_saved_and_loaded_on_other_layouts(programs: Programs, tmp_path) -> None:
    output = programs.warm(4, "examples/train_small_model.py", TMPDIR=str(tmp_path)).ok().output
    losses = [float(loss) for loss in re.findall(r"iteration \d: loss ([\d.]+)", output)]
    assert len(losses) == 5 and losses[0] > losses[-1] > 0
    assert re.findall(r"TP (\d): logits", output) == ["2", "4", "1"]
    differences = re.findall(r"loaded at TP (\d): largest difference of ([\d.e+-]+)", output)
    assert [size for size, _ in differences] == ["4", "1"] and all(float(value) < 1e-5 for _, value in differences)


SCRIPTS = [*ROOT.glob("examples/*.sh"), *(script for script in ROOT.glob("recipes/*.sh") if script.name != "common.sh")]


def test_help_of_a_script_starts_nothing(tmp_path) -> None:
    assert len(SCRIPTS) > 15
    for script in SCRIPTS:
        finished = subprocess.run(
            ["/bin/bash", script, "--help"], env={}, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert finished.returncode == 0 and not finished.stderr and finished.stdout, script
    assert not [*tmp_path.iterdir()]


def test_a_wrong_number_of_ranks_is_an_error_of_one_line(programs: Programs) -> None:
    finished = programs.warm(2, "examples/train_small_model.py")
    assert finished.returncode == 2
    assert finished.output.count("this example needs 4 ranks: torchrun --nproc_per_node 4") == 1


def test_communication_is_shown(programs: Programs) -> None:
    """tests/test_lab.py starts it without a launcher."""
    output = programs.warm(2, "examples/show_communication.py").ok().output
    of_ranks = re.findall(
        r"  rank \d: before (.*)  after (.*?)(?:  gradient_of_output (.*)  gradient_of_input (.*))?\n", output
    )
    text = "text [0, 1, 2, 3], labels [1, 2, 3, 4]"
    first, second = [10, 10, 10, 10], [20, 20, 20, 20]
    assert of_ranks == [
        tuple("" if part is None else str(part) for part in row)
        for row in [
            (text, text, None, None),
            ("nothing", text, None, None),
            ([0, 1, 2, 3], [0, 1, 2, 3], first, [30, 30, 30, 30]),
            ([0, 1, 2, 3], [0, 1, 2, 3], second, [30, 30, 30, 30]),
            ([0, 1], [100, 102], [10, 10], [10, 10]),
            ([100, 101], [100, 102], [20, 20], [20, 20]),
            ([0, 1, 2, 3], [0, 1], [10, 10], [10, 10, 20, 20]),
            ([0, 1, 2, 3], [2, 3], [20, 20], [10, 10, 20, 20]),
            ([0, 1], [0, 1, 100, 101], first, [10, 10]),
            ([100, 101], [0, 1, 100, 101], second, [20, 20]),
            ([0, 1, 2, 3], [0, 1], [10, 10], [10, 10, 20, 20]),
            ([0, 1, 2, 3], [2, 3], [20, 20], [10, 10, 20, 20]),
            ([0, 1], [0, 1, 100, 101], first, [30, 30]),
            ([100, 101], [0, 1, 100, 101], second, [30, 30]),
            ([0, 1, 2, 3], [100, 102], [10, 10], [10, 10, 20, 20]),
            ([100, 101, 102, 103], [104, 106], [20, 20], [10, 10, 20, 20]),
        ]
    ]
