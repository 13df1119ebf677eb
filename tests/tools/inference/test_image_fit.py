"""Images become squares as transformers' processors of images make them."""

import io
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.llava_models import transformers_model

from megatron.common.errors import CheckpointError, ConfigError, DataError
from megatron.common.tokenizer_files import GPT2_BPE, HUGGINGFACE
from megatron.data.image_dataset import common_image_fit, image_writer
from megatron.model.huggingface import read_config
from megatron.tools.command_line import ToolParser
from megatron.tools.inference.images import decoded
from megatron.tools.preprocess.inputs import add_image_flags, check_placeholder, image_settings

SIZE = 28
CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
SQUARE = {"height": SIZE, "width": SIZE}
CROPS = {"size": {"shortest_edge": SIZE}, "crop_size": SQUARE}
PROCESSORS = {
    "crop": ("clip", "CLIPImageProcessorPil", CROPS),
    "pad #7a7468": ("clip", "LlavaImageProcessorPil", {**CROPS, "do_pad": True}),
    "stretch": ("siglip", "SiglipImageProcessorPil", {"size": SQUARE}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of a LLaVA for each encoder."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("clip", "siglip")}
    for kind, folder in folders.items():
        transformers_model(kind).config.save_pretrained(folder)
    return folders


@pytest.mark.parametrize("fit", PROCESSORS)
def test_pixels_are_those_of_transformers(folders: dict[str, Path], fit: str) -> None:
    import transformers

    kind, name, settings = PROCESSORS[fit]
    processor = getattr(transformers, name)(**settings)
    processor.save_pretrained(folders[kind])
    assert read_config(folders[kind]).image_fit == fit
    random = np.random.default_rng(5)
    for width, height in ((40, 90), (91, 40), (28, 28), (17, 5), (200, 31)):
        picture = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
        file = io.BytesIO()
        picture.save(file, "PNG")
        theirs = processor(picture, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
        np.testing.assert_array_equal(decoded(file.getvalue(), SIZE, fit), theirs.transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("settings", "fit"),
    [
        ({"size": SIZE, "crop_size": SIZE}, "crop"),
        ({"size": SQUARE, "crop_size": SQUARE}, "stretch"),
        ({"size": {"shortest_edge": 56}, "crop_size": SQUARE}, "size is"),
        ({**CROPS, "do_center_crop": False}, "do_center_crop is False"),
        ({**CROPS, "crop_size": {"height": 14, "width": 14}}, "crop_size is"),
        ({**CROPS, "image_mean": [0.5, 0.5, 0.5]}, "image_mean is"),
        ({**CROPS, "resample": 2}, "resample is 2"),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_settings_of_a_processor(folders: dict[str, Path], settings: dict, fit: str, is_nested: bool) -> None:
    settings = {"image_processor_type": "CLIPImageProcessor", "image_mean": CLIP_MEAN, **settings}
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folders["clip"] / name).unlink(missing_ok=True)
    name, tree = ("processor_config.json", {"image_processor": settings}) if is_nested else (None, settings)
    (folders["clip"] / (name or "preprocessor_config.json")).write_text(json.dumps(tree))
    if fit in ("crop", "stretch"):
        assert read_config(folders["clip"]).image_fit == fit
        return
    with pytest.raises(CheckpointError, match=fit):
        read_config(folders["clip"])


def test_data_sets_say_how_their_images_were_made(tmp_path: Path) -> None:
    for name, fit in {"a": "stretch", "b": "crop", "c": "crop"}.items():
        with image_writer(str(tmp_path / name), SIZE, fit):
            pass
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert (common_image_fit([a]), common_image_fit([b, c])) == ("stretch", "crop")
    with pytest.raises(DataError, match="with stretch"):
        common_image_fit([a, b])
    (tmp_path / "b_image_fit.txt").write_text("some way")
    with pytest.raises(DataError, match="b_image_fit.txt"):
        common_image_fit([b])


def test_preprocessing_follows_the_processor(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["clip"], tmp_path / "llava")
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "CLIPImageProcessor", **CROPS})
    )
    parser = ToolParser("")
    parser.add_argument("--tokenizer-model")
    parser.add_argument("--format", default="images")
    add_image_flags(parser)

    def fit(*words: str) -> str:
        settings = image_settings(parser.parse_args(["--image-tokens", "4", "--image-token-id", "63", *words]))
        assert settings is not None
        return settings.fit

    model = ("--tokenizer-model", str(folder), "--vision-image-size")
    assert (fit(), fit(*model, str(SIZE))) == ("stretch", "crop")
    assert (fit(*model, str(SIZE), "--image-fit", "stretch"), fit("--image-fit", "pad")) == ("stretch", "pad #7a7468")
    with pytest.raises(ConfigError, match="--vision-image-size is 56"):
        fit(*model, "56")


@pytest.mark.parametrize(
    ("token", "tokens", "kind", "settings", "problem"),
    [
        (63, 60, HUGGINGFACE, {"model_type": "llava", "image_token_index": 63}, None),
        (60, 64, HUGGINGFACE, {"model_type": "llava", "image_token_index": 63}, "that of .* is 63"),
        (64, 64, HUGGINGFACE, None, None),  # join-llava adds it
        (70, 64, HUGGINGFACE, {"vocab_size": 128}, None),
        (65, 64, HUGGINGFACE, {"vocab_size": "x"}, "beyond the vocabulary of 64 tokens: give 64 at most"),
        (64, 64, GPT2_BPE, None, "give 63 at most"),
    ],
)
def test_the_placeholder_is_a_token(
    tmp_path: Path, token: int, tokens: int, kind: str, settings: dict | None, problem: str | None
) -> None:
    if settings is not None:
        (tmp_path / "config.json").write_text(json.dumps(settings))
    with nullcontext() if problem is None else pytest.raises(ConfigError, match=problem):
        check_placeholder(token, tokens, kind, str(tmp_path))


def test_images_that_would_take_too_much_memory() -> None:
    file = io.BytesIO()
    Image.new("RGB", (9000, 2)).save(file, "PNG")
    for fit in ("crop", "pad #7a7468"):
        with pytest.raises(DataError, match="9000 x 2 pixels"):
            decoded(file.getvalue(), 336, fit)
    assert decoded(file.getvalue(), 4, "crop").shape == (4, 4, 3)
