"""Everything that is checked and measured of one record, in one look: what a validation worker does."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from ..processing.sample import IGNORE_INDEX, PATCHES_KEY, SampleProcessor
from .images import BadImage, LoadedImage, Size, content_hash, read_bytes, read_image, resolve_image_path
from .records import BadRecord, Fault, Record, check_record, parse_line


@dataclass(slots=True)
class Measured:
    """One record after its check.

    Attributes:
        digest: 16 bytes over the line and the bytes of its image files.
        image_hashes: 64-bit hashes of the decoded pixels.
        record_hash: 64-bit hash of turns and pixels; equal for records that teach the same.
    """

    row: int
    record_id: str | None = None
    source: str | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    digest: bytes = b""
    length: int = 0
    label_tokens: int = 0
    image_tokens: int = 0
    patches: int = 0
    sizes: list[Size] = field(default_factory=list)
    image_hashes: list[int] = field(default_factory=list)
    record_hash: int = 0


class Measurer:
    """Checks a record completely: form, every image decoded to its end, special tokens, template, length.

    Args:
        samples: The very processor that training uses, with ``check_template``.
    """

    def __init__(self, samples: SampleProcessor) -> None:
        self.samples = samples

    def __call__(self, line: bytes, row: int) -> Measured:
        """Measure one line of ``records.jsonl``; faults are collected, never raised."""
        measured = Measured(row)
        digest = hashlib.blake2b(line, digest_size=16)
        try:
            checked = check_record(parse_line(line))
        except ValueError as error:
            measured.faults.append(Fault("broken_json", str(error)))
            measured.digest = digest.digest()
            return measured
        measured.record_id, measured.source = checked.record_id, checked.source
        measured.faults, measured.notes = checked.faults, checked.notes
        record = checked.record
        if record is not None:
            images = self._images(record, measured, digest)
            measured.faults += self.samples.renderer.control_faults(record)
            if not measured.faults:
                self._tokens(record, images, measured)
        measured.digest = digest.digest()
        return measured

    def _images(self, record: Record, measured: Measured, digest: hashlib.blake2b) -> list[LoadedImage]:
        images = []
        for path in record.images:
            try:
                data = read_bytes(resolve_image_path(self.samples.root, path))
                digest.update(hashlib.blake2b(data, digest_size=16).digest())
                loaded = read_image(data, self.samples.needed)
                self.samples.needed(*loaded.size)
            except BadImage as error:
                digest.update(error.reason.encode())
                measured.faults.append(Fault(error.reason, error.detail, path))
                continue
            measured.notes += loaded.notes
            measured.sizes.append(loaded.size)
            measured.image_hashes.append(content_hash(loaded.image))
            images.append(loaded)
        return images

    def _tokens(self, record: Record, images: list[LoadedImage], measured: Measured) -> None:
        try:
            if self.samples.vision is None:
                self._through_processor(record, images, measured)
            else:
                vision = self.samples.vision
                grids = [vision.grid(*loaded.size) for loaded in images]
                encoded = self.samples.encode(record, measured.row, [vision.tokens(grid) for grid in grids])
                measured.length, measured.label_tokens = len(encoded.input_ids), encoded.label_tokens
                measured.image_tokens = int(encoded.is_image.sum())
                measured.patches = sum(grid[0] * grid[1] * grid[2] for grid in grids)
                if encoded.cut:
                    measured.notes.append("cut_to_max_length")
        except BadRecord as error:
            measured.faults.append(Fault(error.reason, error.detail, error.file))
            return
        content = hashlib.blake2b(repr(record.turns).encode("utf-8", "surrogatepass"), digest_size=8)
        content.update(repr(measured.image_hashes).encode())
        measured.record_hash = int.from_bytes(content.digest(), "little", signed=True)

    def _through_processor(self, record: Record, images: list[LoadedImage], measured: Measured) -> None:
        sample = self.samples.from_images(record, measured.row, images)
        measured.length = len(sample["input_ids"])
        measured.label_tokens = int((sample["labels"][1:] != IGNORE_INDEX).sum())
        measured.image_tokens = int(sample["mm_token_type_ids"].sum())
        measured.patches = sample[PATCHES_KEY]
