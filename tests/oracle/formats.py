"""Number formats of the model: scalar codecs, quantizers, cache rows and stored weights.

All arithmetic is float64 on exact values, except the products and quotients that define a scale:
the definition forms them in FP32, so they are formed in FP32 here.
"""

from dataclasses import dataclass

import numpy as np

# ---- Scalar formats ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Float:
    """A small sign-magnitude format. Its codes count the magnitudes in increasing order."""

    mantissa: int  # explicit mantissa bits
    min_exponent: int  # exponent of the smallest normal value
    largest: float
    sign_bit: int

    def decode(self, codes):
        codes = np.asarray(codes, np.int64)
        magnitude = codes & (self.sign_bit - 1)
        one = 1 << self.mantissa
        exponent = np.maximum(magnitude // one, 1)
        fraction = np.where(magnitude < one, magnitude, one + magnitude % one)
        step = exponent - 1 + self.min_exponent - self.mantissa
        value = np.ldexp(fraction.astype(np.float64), step)
        value = np.where(value > self.largest, np.nan, value)
        return np.where(codes & self.sign_bit, -value, value)

    def step(self, magnitude):
        """Exponent of the spacing between neighbouring values at this magnitude."""
        fraction, exponent = np.frexp(magnitude)
        exponent = np.where(fraction == 0, self.min_exponent, exponent - 1)
        return np.maximum(exponent, self.min_exponent) - self.mantissa

    def encode(self, x):
        """Nearest code: ties to even, saturating, the sign of zero kept."""
        x = np.asarray(x, np.float64)
        if not np.all(np.isfinite(x)):
            raise ValueError("cannot encode a value that is not finite")
        magnitude = np.minimum(np.abs(x), self.largest)
        step = self.step(magnitude)
        # A magnitude that rounds up to the next power of two lands on that binade's first code.
        binade = step + self.mantissa - self.min_exponent
        code = binade * (1 << self.mantissa) + np.rint(np.ldexp(magnitude, -step)).astype(np.int64)
        return (code | np.where(np.signbit(x), self.sign_bit, 0)).astype(np.uint8)

    def distance(self, x):
        """Distance of |x| to the nearest rounding boundary of this format."""
        magnitude = np.abs(np.asarray(x, np.float64))
        step = self.step(np.minimum(magnitude, self.largest))
        unit = np.ldexp(1.0, step)
        scaled = magnitude / unit
        inside = np.abs(scaled - np.floor(scaled) - 0.5)
        # Below the first value of a binade the spacing is half as large.
        one = 1 << self.mantissa
        has_lower = (scaled < one + 1) & (step + self.mantissa > self.min_exponent)
        below = np.where(has_lower, scaled - one + 0.25, np.inf)
        return np.minimum(inside, below) * unit


E4M3 = Float(mantissa=3, min_exponent=-6, largest=448.0, sign_bit=0x80)  # 0x7f, 0xff: NaN
E2M1 = Float(mantissa=1, min_exponent=0, largest=6.0, sign_bit=0x8)
BF16 = Float(mantissa=7, min_exponent=-126, largest=(2 - 2.0**-7) * 2.0**127, sign_bit=0x8000)


def bf16(x):
    """The nearest BF16 value, ties to even, as float64."""
    x = np.asarray(x, np.float64)
    step = BF16.step(x)
    y = np.ldexp(np.rint(np.ldexp(x, -step)), step)
    return np.where(np.abs(y) > BF16.largest, np.copysign(np.inf, y), y)


def bf16_ulp(x):
    """Distance between neighbouring BF16 values at the magnitude of x."""
    return np.ldexp(1.0, BF16.step(x))


def relative_to(distance, x):
    """A distance per element of x in units of the larger of |x| and the RMS of its vector (the last
    axis), because that is what the error of a computed value scales with."""
    rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(rms == 0, np.inf, distance / np.maximum(np.abs(x), rms))



def e8m0_decode(codes):
    codes = np.asarray(codes, np.int64)
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))


def e8m0_encode(x):
    """Byte of an exact power of two."""
    fraction, exponent = np.frexp(np.asarray(x, np.float64))
    if np.any(fraction != 0.5) or np.any(exponent - 1 < -127) or np.any(exponent - 1 > 127):
        raise ValueError("not a power of two that E8M0 can hold")
    return (exponent - 1 + 127).astype(np.uint8)


def ceil_pow2(t):
    """Smallest power of two that is not below t > 0."""
    fraction, exponent = np.frexp(np.asarray(t, np.float64))
    return np.ldexp(1.0, exponent - (fraction == 0.5))


def floor_pow2(t):
    return np.ldexp(1.0, np.frexp(np.asarray(t, np.float64))[1] - 1)


def pack(codes):
    """Two E2M1 codes per byte; the even element sits in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def unpack(packed):
    pairs = np.stack([packed & 15, packed >> 4], -1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


# ---- Quantizers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantizer:
    """Block quantizer along the last axis. A short last block has a scale of its own."""

    block: int
    element: Float
    floor: float  # smallest block maximum
    # "ceil", "floor": E8M0 from amax * FP32(1/largest); "e4m3": E4M3 from amax / largest
    scale_rule: str

    def amax(self, x):
        return np.maximum.reduceat(np.abs(x), np.arange(0, x.shape[-1], self.block), axis=-1)

    def spread(self, per_block, width):
        return np.repeat(per_block, self.block, axis=-1)[..., :width]

    def scales(self, x):
        """Scale bytes, one per block."""
        amax = np.maximum(self.amax(x).astype(np.float32), np.float32(self.floor))
        largest = np.float32(self.element.largest)
        if self.scale_rule == "e4m3":
            return E4M3.encode(amax / largest)
        target = amax * (np.float32(1) / largest)
        return e8m0_encode((ceil_pow2 if self.scale_rule == "ceil" else floor_pow2)(target))

    def scale_values(self, scales):
        return E4M3.decode(scales) if self.scale_rule == "e4m3" else e8m0_decode(scales)

    def quantize(self, x):
        """Returns element codes, scale bytes and dequantized values."""
        x = np.asarray(x, np.float64)
        scales = self.scales(x)
        scale = self.spread(self.scale_values(scales), x.shape[-1])
        codes = self.element.encode(x / scale)
        return codes, scales, self.element.decode(codes) * scale

    def distance(self, x):
        """Relative distances to the nearest rounding boundary: per element and per block scale.

        A scale's unit is the larger of the block maximum and the RMS of the whole vector.
        """
        x = np.asarray(x, np.float64)
        amax, largest = self.amax(x), self.element.largest
        scale = self.spread(self.scale_values(self.scales(x)), x.shape[-1])
        elements = relative_to(self.element.distance(x / scale) * scale, x)
        t = amax / largest
        if self.scale_rule == "e4m3":
            edge = E4M3.distance(t)
        else:
            edge = np.minimum(ceil_pow2(t) - t, t - ceil_pow2(t) / 2)
        rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
        unit = np.maximum(np.maximum(amax, rms), self.floor)
        # Under the floor the scale is constant.
        return elements, np.where(amax < self.floor, np.inf, edge * largest / unit)

    # A cache row is the element codes followed by the scale bytes.

    def rows(self, x):
        codes, scales, values = self.quantize(x)
        data = pack(codes) if self.element is E2M1 else codes
        return np.concatenate([data, scales], -1), values

    def row_parts(self, rows, width):
        """Element codes and scale bytes of cache rows."""
        data = width // 2 if self.element is E2M1 else width
        if rows.shape[-1] != data + -(-width // self.block):
            raise ValueError(f"a row of {rows.shape[-1]} bytes does not hold {width} values")
        codes = unpack(rows[..., :data]) if self.element is E2M1 else rows[..., :data]
        return codes, rows[..., data:]

    def row_values(self, rows, width):
        codes, scales = self.row_parts(rows, width)
        return self.element.decode(codes) * self.spread(self.scale_values(scales), width)


FP8 = Quantizer(block=32, element=E4M3, floor=1e-4, scale_rule="ceil")
FP4_INDEX = Quantizer(block=32, element=E2M1, floor=6 * 2.0**-126, scale_rule="ceil")
FP4_MAIN = Quantizer(block=16, element=E2M1, floor=6 * 2.0**-9, scale_rule="e4m3")


# ---- Stored weights ------------------------------------------------------------------------------

TILE = 32


def dequantize_fp8(codes, scales):
    """E4M3 [out, in] with one E8M0 scale per 32x32 tile."""
    tiles = np.repeat(np.repeat(e8m0_decode(scales), TILE, 0), TILE, 1)
    return E4M3.decode(codes) * tiles[: codes.shape[0], : codes.shape[1]]


def quantize_fp8(w):
    edges = [np.arange(0, n, TILE) for n in w.shape]
    amax = np.maximum.reduceat(np.maximum.reduceat(np.abs(w), edges[0], 0), edges[1], 1)
    scales = e8m0_encode(ceil_pow2(np.maximum(amax, 1e-30) / E4M3.largest))
    tiles = np.repeat(np.repeat(e8m0_decode(scales), TILE, 0), TILE, 1)
    return E4M3.encode(w / tiles[: w.shape[0], : w.shape[1]]), scales


def dequantize_rows(codes, scales):
    """E4M3 [rows, width] with one E8M0 scale per row and 32 columns (Engram tables)."""
    return E4M3.decode(codes) * FP8.spread(e8m0_decode(scales), codes.shape[-1])


def quantize_rows(w):
    scales = e8m0_encode(ceil_pow2(np.maximum(FP8.amax(w), 1e-30) / E4M3.largest))
    return E4M3.encode(w / FP8.spread(e8m0_decode(scales), w.shape[-1])), scales


def dequantize_fp4(packed, scales):
    """Packed E2M1 [out, in/2] with one E8M0 scale per row and 32 inputs (routed experts)."""
    codes = unpack(packed)
    return E2M1.decode(codes) * FP4_INDEX.spread(e8m0_decode(scales), codes.shape[-1])


def quantize_fp4(w):
    scales = e8m0_encode(ceil_pow2(np.maximum(FP4_INDEX.amax(w), 1e-30) / E2M1.largest))
    return pack(E2M1.encode(w / FP4_INDEX.spread(e8m0_decode(scales), w.shape[-1]))), scales
