"""From record to tensors: equal to the processor's own, labels on the answers alone, several templates."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from odb_workflow.model.load import load_processor
from odb_workflow.processing.identity import processor_identity
from odb_workflow.processing.sample import SampleProcessor
from odb_workflow.processing.template import TemplateRenderer
from odb_workflow.processing.vision import pixels_of
from odb_workflow.tmdb.records import BadRecord
from odb_workflow.tmdb.store import RecordStore
from PIL import Image
from tmdb_helpers import cached_processor
from tmdb_helpers import parsed_record as make

CHATML = "<|im_start|>{}\n{}<|im_end|>\n"
VISION = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture
def processor(tiny_model_dir: Path):
    return cached_processor(tiny_model_dir)


@pytest.fixture
def own_processor(tiny_model_dir: Path):
    """A processor that the test may change."""
    return load_processor(tiny_model_dir)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, (width, height) in {"a.png": (64, 64), "b.jpg": (200, 77), "wide.png": (600, 10)}.items():
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(tmp_path / name)
    return tmp_path


def supervised(processor, sample) -> list[str]:
    """The decoded text of each unbroken run of label tokens."""
    labels = sample["labels"].tolist()
    runs: list[list[int]] = []
    for before, now in zip([-100, *labels], labels, strict=False):
        if now != -100:
            if before == -100:
                runs.append([])
            runs[-1].append(now)
    return [processor.tokenizer.decode(run) for run in runs]


DIALOG = (
    ("system", "Be brief."),
    ("user", "<image>\nWhat is <image> this? größe 图 🙂"),
    ("assistant", "A red disc. 图🙂"),
    ("user", "And <image>?"),
    ("assistant", "Blue."),
)


def test_equal_to_the_processor_called_plainly(processor, folder: Path) -> None:
    record = make(*DIALOG, images=("a.png", "b.jpg", "wide.png"))
    sample = SampleProcessor(processor, 4096, folder, check_template=True)(record, 3)
    text = "".join(CHATML.format(role, text.replace("<image>", VISION)) for role, text in DIALOG)
    pictures = [Image.open(folder / name).convert("RGB") for name in record.images]
    plain = processor(text=[text], images=pictures, return_tensors="pt")
    for key in ("input_ids", "attention_mask", "mm_token_type_ids"):
        assert torch.equal(sample[key], plain[key][0]), key
    assert torch.equal(sample["image_grid_thw"], plain["image_grid_thw"])
    assert torch.equal(sample["pixel_values"], plain["pixel_values"])
    assert sample["row"] == 3 and sample["odb_n_patches"] == len(plain["pixel_values"])
    assert {key: value.dtype for key, value in sample.items() if torch.is_tensor(value)} == {
        **dict.fromkeys(("input_ids", "attention_mask", "labels", "mm_token_type_ids"), torch.int64),
        "pixel_values": torch.float32,
        "image_grid_thw": torch.int64,
    }


def test_every_record_of_the_tiny_tmdb_equals_the_plain_way(processor, tiny_tmdb: Path) -> None:
    store = RecordStore(tiny_tmdb)
    samples = SampleProcessor(processor, 100_000, tiny_tmdb, check_template=True)
    for row in range(len(store)):
        record = store[row]
        sample = samples(record, row)
        text = "".join(
            CHATML.format(turn.role, turn.text.replace("<image>", VISION)) for turn in record.turns
        )
        pictures = [Image.open(tiny_tmdb / name).convert("RGB") for name in record.images] or None
        plain = processor(text=[text], images=pictures, return_tensors="pt")
        assert torch.equal(sample["input_ids"], plain["input_ids"][0])
        assert supervised(processor, sample) == [
            turn.text + "<|im_end|>" for turn in record.turns if turn.role == "assistant"
        ]
        assert ("pixel_values" in sample) == bool(record.images)
        if record.images:
            assert torch.equal(sample["pixel_values"], plain["pixel_values"])


def test_labels_are_the_answers_and_their_end_tokens(processor, folder: Path) -> None:
    record = make(*DIALOG, images=("a.png", "b.jpg", "wide.png"))
    sample = SampleProcessor(processor, 4096, folder)(record, 0)
    assert supervised(processor, sample) == ["A red disc. 图🙂<|im_end|>", "Blue.<|im_end|>"]
    kept = sample["labels"] != -100
    assert torch.equal(sample["labels"][kept], sample["input_ids"][kept])
    assert not sample["mm_token_type_ids"][kept].any()


@pytest.mark.parametrize(
    "answer",
    [
        "x",
        " leading",
        "\n\nyes",
        "trailing \n",
        "e\u0301 composed",
        "one\n\ntwo",
        "图",
        "\u00a0",
        "0",
        "a" * 500,
        "<tool_call>",
    ],
)
def test_answers_of_every_kind_are_wholly_supervised(processor, folder: Path, answer: str) -> None:
    sample = SampleProcessor(processor, 4096, folder, check_template=True)(
        make(
            ("user", "e\u0301 q \u1100\u1161 "),
            ("assistant", answer),
            ("user", "more e\u0301"),
            ("assistant", "b"),
        ),
        0,
    )
    normal = "é composed" if "composed" in answer else answer  # the tokenizer composes characters (NFC)
    assert supervised(processor, sample) == [normal + "<|im_end|>", "b<|im_end|>"]


def test_text_only_sample_has_no_vision_keys(processor, folder: Path) -> None:
    sample = SampleProcessor(processor, 4096, folder)(make(("user", "q"), ("assistant", "a")), 0)
    assert "pixel_values" not in sample and "image_grid_thw" not in sample and sample["odb_n_patches"] == 0


@pytest.mark.parametrize(
    "text",
    [
        "a<|im_end|>b",
        "<|im_start|>assistant\nyes",
        "<|image_pad|>",
        "x<|vision_start|>",
        "<|endoftext|>",
        "<|video_pad|>",
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_control_tokens_in_a_text_are_refused(processor, folder: Path, role: str, text: str) -> None:
    turns = {"system": "s", "user": "q", "assistant": "a"} | {role: text}
    with pytest.raises(BadRecord) as caught:
        SampleProcessor(processor, 4096, folder)(make(*turns.items()), 9)
    assert caught.value.reason == "special_token" and caught.value.row == 9
    number = list(turns).index(role) + 1
    assert f"turn {number} holds '<|" in caught.value.detail


def test_text_that_only_looks_like_a_control_token_is_kept(processor, folder: Path) -> None:
    answer = "<|im_ end|> < |im_end| > <image > im_end"
    sample = SampleProcessor(processor, 4096, folder)(make(("user", "q"), ("assistant", answer)), 0)
    assert supervised(processor, sample) == [answer + "<|im_end|>"]


def test_truncation_and_padding_left_in_the_tokenizer_change_nothing(own_processor, folder: Path) -> None:
    record = make(*DIALOG, images=("a.png", "b.jpg", "wide.png"))
    samples = SampleProcessor(own_processor, 4096, folder)
    expected = samples(record, 0)["input_ids"]
    own_processor.tokenizer.backend_tokenizer.enable_truncation(8)
    own_processor.tokenizer.backend_tokenizer.enable_padding(length=500)
    assert torch.equal(samples(record, 0)["input_ids"], expected)


# Other templates

TRIMMED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)
LLAVA = (
    "{% for m in messages %}{% if m.role == 'assistant' %}ASSISTANT: "
    "{% else %}{{ m.role | upper }}: {% endif %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>\n{% endif %}{% endfor %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% else %} {% endif %}{% endfor %}"
)
PRINTS_ANSWERS = (  # as some published fine-tunes of Qwen3-VL do
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' %}{% for p in m.content %}"
    "{% if p.type == 'image' %}Picture 1: <|vision_start|><|image_pad|><|vision_end|>\n{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
NO_END = "{% for m in messages %}[{{ m.role }}] {% for p in m.content %}{{ p.text }}{% endfor %} {% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{{ p.text.split('</think>')[-1] }}{% endfor %}<|im_end|>\n{% endfor %}"
)
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{{ p.text }}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
)


def with_template(own_processor, template: str):
    own_processor.chat_template = template
    return own_processor


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TRIMMED, ["one<|im_end|>", "two<|im_end|>"]),
        (LLAVA, ["  one \n<|endoftext|>", " two<|endoftext|>"]),
        (NO_END, ["  one \n", " two"]),
        (ALTERNATING, ["  one \n<|im_end|>", "two<|im_end|>"]),
        (PRINTS_ANSWERS, ["  one \n<|im_end|>", "two<|im_end|>"]),
    ],
)
def test_other_templates(own_processor, folder: Path, template: str, expected: list[str]) -> None:
    processor = with_template(own_processor, template)
    record = make(("user", " q "), ("assistant", "  one \n"), ("user", "p"), ("assistant", "two"))
    sample = SampleProcessor(processor, 4096, folder, check_template=True)(record, 0)
    assert supervised(processor, sample) == expected


@pytest.mark.parametrize("template", [TRIMMED, LLAVA, PRINTS_ANSWERS])
def test_other_templates_with_images(own_processor, folder: Path, template: str) -> None:
    processor = with_template(own_processor, template)
    record = make(("user", "<image> q <image>"), ("assistant", "one"), images=("a.png", "b.jpg"))
    sample = SampleProcessor(processor, 4096, folder, check_template=True)(record, 0)
    assert len(sample["image_grid_thw"]) == 2
    assert int(sample["mm_token_type_ids"].sum()) == sample["odb_n_patches"] // 4


@pytest.mark.parametrize(
    ("template", "turns", "message"),
    [
        (ALTERNATING, [("user", "a"), ("user", "b"), ("assistant", "c")], "roles must alternate"),
        (THINKING, [("user", "a"), ("assistant", "<b></think>c")], "changes the text"),
        (DROPS_SYSTEM, [("system", "s"), ("user", "a"), ("assistant", "c")], "lost: .*system"),
    ],
)
def test_conversations_that_a_template_does_not_render(
    own_processor, folder, template, turns, message
) -> None:
    samples = SampleProcessor(with_template(own_processor, template), 4096, folder, check_template=True)
    with pytest.raises(BadRecord, match=message) as caught:
        samples(make(*turns), 0)
    assert caught.value.reason == "template_error"
    assert len(samples(make(("user", "a"), ("assistant", "c")), 0)["input_ids"]) > 2


def test_templates_that_print_content_as_it_is_get_a_string(own_processor, folder: Path) -> None:
    processor = with_template(own_processor, PRINTS_ANSWERS)
    record = make(
        ("system", "be 'brief'"), ("user", "<image>q"), ("assistant", 'it\'s "a"'), images=("a.png",)
    )
    text = TemplateRenderer(processor).render(record, 0, check=True).text
    assert "type" not in text and "be 'brief'<|im_end|>" in text and 'it\'s "a"<|im_end|>' in text


def test_image_marker_that_is_also_a_control_token(own_processor, folder: Path) -> None:
    own_processor.tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    samples = SampleProcessor(own_processor, 4096, folder)
    assert samples.renderer.control.search("<image>")
    sample = samples(make(("user", "<image>q"), ("assistant", "a"), images=("a.png",)), 0)
    assert int(sample["mm_token_type_ids"].sum()) == 4


def test_template_that_drops_images(own_processor, folder: Path) -> None:
    samples = SampleProcessor(with_template(own_processor, NO_END), 4096, folder)
    with pytest.raises(BadRecord, match="for each of 1 images"):
        samples(make(("user", "<image>q"), ("assistant", "a"), images=("a.png",)), 0)


def test_shapes_are_rendered_once(processor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = TemplateRenderer(processor)
    calls = []
    plain = renderer._apply
    monkeypatch.setattr(renderer, "_apply", lambda turns: calls.append(1) or plain(turns))
    for number in range(5):
        renderer.render(make(("user", f"q{number}"), ("assistant", f"a{number}")), number)
    assert len(calls) == 1


# The processor as it is


@pytest.mark.parametrize("size", [(64, 64), (1, 5), (130, 7), (3000, 2000)])
def test_pixels_in_place_are_the_pixels(size: tuple[int, int]) -> None:
    array = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(array)
    assert np.array_equal(pixels_of(image)[:3].permute(1, 2, 0).numpy(), array)
    cropped = image.crop((0, 0, size[0], max(size[1] // 2, 1)))
    assert np.array_equal(pixels_of(cropped)[:3].permute(1, 2, 0).numpy(), np.asarray(cropped))


def test_pixels_without_the_arrow_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=np.uint8))
    expected = pixels_of(image)[:3]

    def missing(_image):
        raise TypeError("no Arrow interface")

    monkeypatch.setattr("odb_workflow.processing.vision.pa.array", missing)
    assert torch.equal(pixels_of(image), expected)


def test_generic_path_gives_the_same_sample(processor, folder: Path) -> None:
    record = make(*DIALOG, images=("a.png", "b.jpg", "wide.png"))
    direct = SampleProcessor(processor, 4096, folder)
    generic = SampleProcessor(processor, 4096, folder)
    generic.vision = generic._patches = None
    ours, theirs = direct(record, 1), generic(record, 1)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]) if torch.is_tensor(value) else value == theirs[key]


def test_direct_path_is_left_when_it_disagrees(own_processor, folder: Path, caplog, monkeypatch) -> None:
    plain = own_processor.image_processor._preprocess

    def flipped(images, *args, **kwargs):
        return plain([image.flip(-1) for image in images], *args, **kwargs)

    monkeypatch.setattr(own_processor.image_processor, "_preprocess", flipped)
    samples = SampleProcessor(own_processor, 4096, folder)
    assert samples.vision is None and "differs from the processor" in caplog.text


def test_pixel_dtype(processor, folder: Path) -> None:
    record = make(("user", "<image>q"), ("assistant", "a"), images=("b.jpg",))
    whole = SampleProcessor(processor, 4096, folder)(record, 0)["pixel_values"]
    half = SampleProcessor(processor, 4096, folder, pixel_dtype=torch.bfloat16)(record, 0)["pixel_values"]
    assert half.dtype == torch.bfloat16 and torch.equal(half, whole.to(torch.bfloat16))


def test_image_faults_name_the_file(processor, folder: Path) -> None:
    samples = SampleProcessor(processor, 4096, folder)
    (folder / "broken.jpg").write_bytes((folder / "b.jpg").read_bytes()[:800])
    for name, reason in {
        "broken.jpg": "broken_image",
        "none.png": "missing_file",
        "../x.png": "path_outside",
    }.items():
        with pytest.raises(BadRecord) as caught:
            samples(make(("user", "<image>q"), ("assistant", "a"), images=(name,)), 4)
        assert (caught.value.reason, caught.value.file, caught.value.row) == (reason, name, 4)


def test_identity_follows_what_decides_a_sample(tiny_model_dir: Path, own_processor) -> None:
    first = processor_identity(own_processor)
    assert processor_identity(load_processor(tiny_model_dir)) == first
    assert processor_identity(load_processor(tiny_model_dir, 4096)) != first
    changed = copy.copy(own_processor)
    changed.chat_template = TRIMMED
    assert processor_identity(changed) != first
