"""Reads a checkpoint: config.json and safetensors files. Also reads and writes single files."""

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np

from . import formats

# Storage type of each safetensors dtype. BF16 and the 8-bit floats stay raw bits.
STORAGE = {
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I8": np.uint8,  # two packed E2M1 codes per byte
    "U8": np.uint8,
    "BF16": np.uint16,
    "F32": np.float32,
    "I32": np.int32,
}


def read_safetensors(path):
    """Memory-mapped tensors of one file: name -> (dtype name, array)."""
    with open(path, "rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
    data = np.memmap(path, np.uint8, "r")
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_size + offset for offset in entry["data_offsets"])
        storage = np.dtype(STORAGE[entry["dtype"]])
        shape = tuple(entry["shape"])
        if end - begin != storage.itemsize * int(np.prod(shape, dtype=np.int64)) or end > len(data):
            raise ValueError(f"{path}: {name}: data range does not fit shape {shape}")
        raw = data[begin:end]
        if raw.ctypes.data % storage.itemsize:
            raw = raw.copy()
        tensors[name] = (entry["dtype"], raw.view(storage).reshape(shape))
    return tensors


def write_safetensors(path, tensors):
    """Writes name -> (dtype name, array)."""
    header, offset, blobs = {}, 0, []
    for name, (dtype, array) in tensors.items():
        blob = np.ascontiguousarray(array, STORAGE[dtype]).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(np.shape(array)),
            "data_offsets": [offset, offset + len(blob)],
        }
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for blob in blobs:
            file.write(blob)


def read_dump(path):
    return {name: np.array(array) for name, (_, array) in read_safetensors(path).items()}


def write_dump(path, tensors):
    """Writes a dump: uint8 stays U8, integers become I32, everything else F32."""

    def kind(array):
        if array.dtype == np.uint8:
            return "U8"
        return "I32" if array.dtype.kind in "iu" else "F32"

    write_safetensors(path, {name: (kind(array), array) for name, array in tensors.items()})


class Config:
    """The text configuration. Every key of `text_config` is an attribute."""

    def __init__(self, document):
        self.document = document
        text = document.get("text_config")
        if text is None:
            raise ValueError("config.json has no text_config")
        self.__dict__.update(text)
        quantized = "quantization_config" in document
        self.stored_f32 = not quantized and document.get("dtype") == "float32"
        fixed = {
            "hidden_act": "silu",
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "attention_bias": False,
        }
        for key, expected in fixed.items():
            if text.get(key, expected) != expected:
                raise ValueError(f"config.json: {key} must be {expected!r}, is {text[key]!r}")
        self.gate_temp = text.get("gate_temp", 1.0)
        self.rope_scaling = text.get("rope_scaling")
        self.layers = range(self.num_hidden_layers)
        self.stages = range(text.get("num_nextn_predict_layers", 0))

    def ratio(self, layer):
        return self.compress_ratios[layer]

    def experts_per_token(self, layer):
        """Draft stages count on behind the backbone's layers."""
        if layer < self.num_hidden_layers:
            return self.num_experts_per_tok
        return self.dspark_num_experts_per_tok

    def kv_source(self, layer):
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def index_source(self, layer):
        return max(s for s in self.index_source_layer_ids if s <= layer)

    def mode(self, layer):
        if self.ratio(layer) == 0:
            return "window"
        if layer in self.kv_source_layer_ids:
            return "full"
        return "reindex" if layer in self.index_source_layer_ids else "reuse"

    def uses_candidates(self, layer):
        source = self.candidate_source_layer_id
        return source >= 0 and layer in self.index_source_layer_ids and layer > source


class Checkpoint:
    CACHE_BYTES = 512 << 20  # dequantized weights kept between uses

    def __init__(self, directory):
        self.directory = Path(directory)
        self.config = Config(json.loads((self.directory / "config.json").read_text()))
        index = json.loads((self.directory / "model.safetensors.index.json").read_text())
        self.files = index["weight_map"]
        self.open_files = {}
        self.cache = OrderedDict()
        self.cached_bytes = 0

    def __contains__(self, name):
        return name in self.files

    def raw(self, name):
        """(dtype name, memory-mapped array)."""
        if name not in self.files:
            raise KeyError(f"{self.directory}: no tensor {name}")
        path = self.directory / self.files[name]
        if path not in self.open_files:
            self.open_files[path] = read_safetensors(path)
        return self.open_files[path][name]

    def quantized(self, name):
        """True if a linear with this weight quantizes its input."""
        return self.raw(name)[0] in ("F8_E4M3", "I8")

    def scale_of(self, name):
        return self.raw(name.removesuffix("weight") + "scale")[1]

    def rows(self, name, rows=slice(None)):
        """Rows of a tensor as float64, dequantized. Only unquantized tensors and tables with a
        scale per row may be read in part."""
        dtype, array = self.raw(name)
        array = np.array(array[rows])
        if dtype == "F32":
            value = array.astype(np.float64)
        elif dtype == "BF16":
            value = (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        elif dtype == "I8":
            value = formats.dequantize_fp4(array, np.array(self.scale_of(name)))
        elif name.endswith("embed.weight"):
            value = formats.dequantize_rows(array, np.array(self.scale_of(name)[rows]))
        else:
            value = formats.dequantize_fp8(array, np.array(self.scale_of(name)))
        if not np.all(np.isfinite(value)):
            raise ValueError(f"{name}: a weight or scale is NaN or infinite")
        return value

    def weight(self, name):
        """The whole tensor as float64."""
        if name in self.cache:
            self.cache.move_to_end(name)
            return self.cache[name]
        value = self.rows(name)
        self.cache[name] = value
        self.cached_bytes += value.nbytes
        while self.cached_bytes > self.CACHE_BYTES and len(self.cache) > 1:
            self.cached_bytes -= self.cache.popitem(last=False)[1].nbytes
        return value
