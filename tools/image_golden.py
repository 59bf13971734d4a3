#!/usr/bin/env python3
"""Writes tests/image/golden: small image files and what Pillow makes of them.

    python3 -m venv .venv-images && .venv-images/bin/pip install pillow==11.3.0
    .venv-images/bin/python tools/image_golden.py

expected.json lists sizes as the released model's processor computes them, and SHA-256 digests of RGB
bytes: of the files decoded and converted to RGB, of a pattern resized by antialiased bicubic
filtering, and of files fitted into their boxes. Pillow 13 changes the height of some images before the
width, which rounds differently. Of gray samples with 16 bits the upper half is expected, where Pillow
clips them to 255.
"""

import hashlib
import io
import json
import math
import pathlib
import struct
import zlib

from PIL import Image

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "tests" / "image" / "golden"
SIZES = [((23, 17), (46, 34)), ((23, 17), (11, 9)), ((64, 48), (64, 20)), ((64, 48), (13, 48)),
         ((1, 1), (42, 56)), ((100, 3), (7, 84)), ((301, 205), (140, 98)), ((5, 200), (40, 11)),
         ((300, 200), (301, 199)), ((640, 480), (644, 483))]
# (patch, cell, least pixels, most slots): the released model's, and small ones.
RELEASED = (14, 3, 295936, 1024)
PLANS = [(RELEASED, (w, h)) for w in (1, 37, 544, 545, 1303, 2000, 7000) for h in (1, 60, 545, 1302, 4100)
         ] + [((4, 2, 300, 40), (w, h)) for w in (1, 5, 23, 47, 300) for h in (7, 17, 33, 90, 900)]
FITS = [("rgb.png", RELEASED), ("420.jpg", (14, 3, 2000, 40)), ("420.jpg", (4, 2, 300, 40)),
        ("gray.png", (5, 2, 0, 12)), ("rgb.png", (4, 2, 300, 60))]


def pattern(width, height):
    """Bytes of a linear congruential generator, with hard edges every eighth sample."""
    state, out = 12345, bytearray()
    for i in range(width * height * 3):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        out.append((state >> 16 & 0xFF) if i % 8 else (0xFF if state & 0x10000 else 0))
    return bytes(out)


def image_of(size, mode="RGB"):
    return Image.frombytes("RGB", size, pattern(*size)).convert(mode)


def smooth(size):
    """For formats with loss: what a camera would see."""
    width, height = size
    return Image.frombytes("RGB", size, bytes(
        v for y in range(height) for x in range(width)
        for v in (x * 255 // width, y * 255 // height, (x * y) % 256)))


def encoded(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png16(size, color, channels):
    """16 bits per sample, which Pillow cannot write as RGB."""
    width, height = size
    row = 2 * channels * width
    data = pattern(2 * width, height)
    raw = b"".join(b"\0" + data[y * row:(y + 1) * row] for y in range(height))

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(
            ">I", zlib.crc32(name + body))

    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, color, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b""))


def interlaced_gif(size):
    image = image_of(size).quantize(32)
    return encoded(image, "GIF", interlace=True)


def part_gif(size, transparent=None, local=False):
    """A frame that leaves a margin of its canvas, whose background index is not 0."""
    frame = image_of((size[0] - 5, size[1] - 4)).quantize(16)
    data = encoded(frame, "GIF", interlace=False)
    at = 13 + 3 * 16  # behind the header and the palette
    palette, rest = data[13:at], data[at:]
    if rest[:2] == b"!\xf9":
        rest = rest[8:]
    assert rest[:1] == b"," and rest[9] == 0
    control = b"" if transparent is None else b"!\xf9\x04" + bytes([1, 0, 0, transparent, 0])
    head = data[:6] + struct.pack("<HH", *size) + bytes([data[10], 5, 0])
    place = b"," + struct.pack("<HHHH", 3, 2, *frame.size)
    own = bytes([0x83]) + palette[::-1] if local else b"\0"
    return head + palette + control + place + own + rest[10:]


def files():
    size = (23, 17)
    rgba = image_of(size).convert("RGBA")
    rgba.putalpha(Image.frombytes("L", size, pattern(*size)[:size[0] * size[1]]))
    frames = [smooth(size), smooth(size).rotate(180)]
    photo = smooth((47, 33))
    return {
        "rgb.png": encoded(image_of(size), "PNG"),
        "rgba.png": encoded(rgba, "PNG"),
        "gray.png": encoded(image_of(size, "L"), "PNG"),
        "gray_alpha.png": encoded(rgba.convert("LA"), "PNG"),
        "bits.png": encoded(image_of(size, "1"), "PNG"),
        "palette.png": encoded(image_of(size).quantize(16), "PNG", bits=4),
        "palette_transparent.png": encoded(image_of(size).quantize(16), "PNG", transparency=3),
        "rgb16.png": png16(size, 2, 3),
        "gray16.png": png16(size, 0, 1),
        "420.jpg": encoded(photo, "JPEG", quality=90),
        "444.jpg": encoded(photo, "JPEG", quality=80, subsampling=0),
        "progressive.jpg": encoded(photo, "JPEG", progressive=True),
        "gray.jpg": encoded(photo.convert("L"), "JPEG"),
        "extraneous.jpg": encoded(photo, "JPEG").replace(b"\xff\xdb", b"\x12\x34\xff\xdb", 1),
        "cmyk.jpg": encoded(photo.convert("CMYK"), "JPEG"),
        "lossless.webp": encoded(image_of(size), "WEBP", lossless=True),
        "lossless_alpha.webp": encoded(rgba, "WEBP", lossless=True, exact=True),
        "lossy.webp": encoded(photo, "WEBP", quality=80),
        "animated.webp": encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:],
                                 lossless=True),
        "plain.gif": encoded(image_of(size).quantize(16), "GIF", interlace=False),
        "interlaced.gif": interlaced_gif(size),
        "part.gif": part_gif(size),
        "part_transparent.gif": part_gif(size, 7, local=True),
        "part_outside.gif": part_gif(size, 200),
        "animated.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
    }


def fit(geometry, size):
    """The box in pixels, the image's size in it, the slots; None if it does not fit."""
    patch, cell, least, most = geometry
    side = patch * cell
    width, height = size
    if width * height < least:
        scale = math.sqrt(least / (width * height))
        width, height = int(width * scale), int(height * scale)

    def slots(box):
        columns, rows = (math.ceil(length // patch / cell) for length in box)
        return rows * (columns + 1) + 2

    box = tuple(math.ceil(length / patch) * patch for length in (width, height))
    if slots(box) > most:
        ratio = height / width
        columns = math.sqrt((most - 2) / ratio + 0.25) - 0.5
        rows = columns * ratio
        if columns < 1:
            box = (side, (most - 2) // 2 * side)
        elif rows < 1:
            box = ((most - 3) * side, side)
        else:
            scale = min(math.floor(columns) * side / width, math.floor(rows) * side / height)
            box = tuple(math.floor(length * scale / patch) * patch for length in (width, height))
    content = list(box)
    if size[0] / size[1] > box[0] / box[1]:
        content[1] = round(size[1] / size[0] * box[0])
    elif size[0] / size[1] < box[0] / box[1]:
        content[0] = round(size[0] / size[1] * box[1])
    return None if slots(box) > most or min(content) < 1 else (box, content, slots(box))


def digest(image):
    return hashlib.sha256(image.tobytes()).hexdigest()


def main():
    GOLDEN.mkdir(parents=True, exist_ok=True)
    out = {"decode": [], "resize": [], "plan": [], "fit": []}
    for name, data in files().items():
        (GOLDEN / name).write_bytes(data)
        image = Image.open(io.BytesIO(data))
        if image.mode == "I;16":
            image = Image.frombytes("L", image.size, image.tobytes()[1::2])
        image = image.convert("RGB")
        out["decode"].append({"file": name, "size": list(image.size), "sha256": digest(image)})
    for size, target in SIZES:
        image = image_of(size).resize(target, Image.Resampling.BICUBIC)
        out["resize"].append({"from": list(size), "to": list(target), "sha256": digest(image)})
    for geometry, size in PLANS:
        found = fit(geometry, size)
        out["plan"].append({"geometry": geometry, "image": size, "box": found and found[0],
                            "content": found and found[1], "slots": found and found[2]})
    for name, geometry in FITS:
        image = Image.open(GOLDEN / name).convert("RGB")
        box, content, slots = fit(geometry, image.size)
        padded = Image.new("RGB", box, (127, 127, 127))
        padded.paste(image.resize(content, Image.Resampling.BICUBIC),
                     tuple(round((b - c) * 0.5) for b, c in zip(box, content)))
        out["fit"].append({"file": name, "geometry": geometry, "slots": slots,
                           "sha256": digest(padded)})
    lines = [f' "{key}": [\n  ' + ",\n  ".join(json.dumps(entry) for entry in value) + "\n ]"
             for key, value in out.items()]
    (GOLDEN / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
