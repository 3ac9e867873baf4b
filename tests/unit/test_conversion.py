"""Each choice against the mapping as it stands, by computation of its own; on the CPU and on a device alike."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch

from bagelplane.client import Conversion, NumpyReader, PackedLoader
from bagelplane.client.conversion import to_arrays
from bagelplane.client.devices import CudaDevice, PlainDevice, open_device, parse_device, tensor_over
from bagelplane.client.tensors import CpuTensors, DeviceTensors
from bagelplane.engine.layout import INT_ARRAYS, assemble, write_planes
from bagelplane.engine.pack import Pack
from bagelplane.errors import SpecError

CLIP = [[0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]]
HALF = [[0.5] * 3, [0.5] * 3]
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
PIXEL_KEYS = ("padded_images", "vae_images", "packed_vit_tokens", "vit_images")


def make_pack(**changes: Any) -> tuple[Pack, list[np.ndarray]]:
    """Three images, one emitted as VAE twice and as ViT once, all 256 values of a byte among them."""
    shapes = [(28, 56), (64, 32), (14, 42)]
    random = np.random.RandomState(1)
    images = [random.randint(0, 256, (*shape, 3)).astype(np.uint8) for shape in shapes]
    images[0].reshape(-1)[: 256 * 3] = np.arange(256).repeat(3)
    scalars = {
        "sequence_length": 9,
        "sample_lens": [5, 4],
        "split_lens": [2, 3, 4],
        "attn_modes": ["causal", "full", "noise"],
        "sample_split_counts": [2, 1],
        "max_num_tokens": 16,
        "use_flex": False,
        "patchified_vae_latent_shapes": [(2, 4), (4, 2), (2, 4)],
        "batch_data_indexes": [{"data_indexes": [1], "worker_id": 0, "dataset_name": "a"}],
        "vae_normalisation": None,
        "vit_normalisation": None,
        **changes,
    }
    floats = {"packed_timesteps": random.randn(2).astype(np.float32), "ce_loss_weights": np.float32([1, 0.5])}
    arrays = {**{name: random.randint(0, 99, 3) for name in INT_ARRAYS}, **floats}
    return Pack(3, scalars, arrays, shapes, [0, 1, 0], [0, 2], 14, {}), images


def as_floats(pack: Pack, images: list[np.ndarray]) -> list[np.ndarray]:
    """The images as a ring of finished floats has them."""
    planes = [np.empty((3, *image.shape[:2]), np.float32) for image in images]
    write_planes(pack, images, planes)
    return planes


def numpy_of(value: Any) -> Any:
    """Tensors as arrays; those of a type that NumPy does not have as their bits."""
    if isinstance(value, list):
        return [numpy_of(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
    return value


def assert_same(left: Any, right: Any, where: str = "") -> None:
    if isinstance(right, dict):
        assert list(left) == list(right), where
        for key in right:
            assert_same(left[key], right[key], f"{where} {key}")
    elif isinstance(right, list):
        assert len(left) == len(right), where
        for one, other in zip(left, right, strict=True):
            assert_same(one, other, where)
    elif isinstance(right, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert_same(numpy_of(left), numpy_of(right), where)
    elif isinstance(right, np.ndarray):
        left = numpy_of(left)
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert left.tobytes() == right.tobytes(), where
    else:
        assert (type(left), left) == (type(right), right), where


def choices() -> list[Conversion]:
    made = []
    for dtype, normalise, pad, patchify, masks in itertools.product((None, *DTYPES), *[(True, False)] * 4):
        try:
            made.append(Conversion(dtype, normalise, pad, patchify, masks))
        except SpecError:
            assert not normalise
            assert pad or dtype is not None
    return made


def expected(pack: Pack, images: list[np.ndarray], choice: Conversion) -> dict[str, Any]:
    """The default mapping, with each choice worked into it in the plainest way there is."""
    default = assemble(pack, images)
    dtype = DTYPES[choice.dtype or "float32"]

    def planes(number: int, kind: str, place: int) -> torch.Tensor:
        mean, std = (pack.scalars[f"{kind}_normalisation"] or [HALF] * 9)[place]
        scaled = images[number].astype(np.float32) / np.float32(255)
        floats = (scaled - np.array(mean, np.float32)) / np.array(std, np.float32)
        return torch.from_numpy(np.ascontiguousarray(floats.transpose(2, 0, 1))).to(dtype)

    def whole(kind: str) -> list[torch.Tensor]:
        numbers = pack.vae_images if kind == "vae" else pack.vit_images
        if not choice.normalise:
            return [torch.from_numpy(images[number]) for number in numbers]
        return [planes(number, kind, place) for place, number in enumerate(numbers)]

    def patches(image: np.ndarray) -> np.ndarray:
        height, width = image.shape[:2]
        return np.stack(
            [
                image[y : y + 14, x : x + 14].reshape(-1)
                for y in range(0, height, 14)
                for x in range(0, width, 14)
            ]
        )

    mapping: dict[str, Any] = {}
    for key, value in default.items():
        if key == "nested_attention_masks" and not choice.masks:
            mapping["split_lens"], mapping["attn_modes"] = [2, 3, 4], ["causal", "full", "noise"]
        elif key == "padded_images" and not choice.pad:
            mapping["vae_images"] = whole("vae")
        elif key == "packed_vit_tokens" and not choice.patchify:
            mapping["vit_images"] = whole("vit")
        elif key == "packed_vit_tokens" and not choice.normalise:
            mapping[key] = torch.from_numpy(np.concatenate([patches(images[n]) for n in pack.vit_images]))
        elif key in PIXEL_KEYS:
            mapping[key] = torch.from_numpy(value).to(dtype)
        else:
            mapping[key] = value
    return mapping


NORMALISATIONS: list[dict[str, Any]] = [
    {},
    {"vae_normalisation": [CLIP, HALF, CLIP], "vit_normalisation": [CLIP, HALF]},
    {"use_flex": True},
]


@pytest.mark.parametrize("changes", NORMALISATIONS, ids=["usual", "by image", "flex"])
@pytest.mark.parametrize("choice", choices(), ids=str)
def test_each_choice_gives_the_default_with_that_worked_in_wherever_it_is_made(
    choice: Conversion, changes: dict[str, Any]
) -> None:
    pack, images = make_pack(**changes)
    wanted = expected(pack, images, choice)
    on_device = DeviceTensors(choice, PlainDevice(torch.device("cpu")))
    made = [CpuTensors(choice).convert(pack, images), on_device.hand_over(on_device.convert(pack, images))]
    if choice.dtype != "bfloat16":
        made.append(to_arrays(pack, images, choice))
    if choice.normalise:
        floats = as_floats(pack, images)
        made += [CpuTensors(choice).convert(pack, floats), on_device.convert(pack, floats)[0]]
    for mapping in made:
        assert_same(
            {key: numpy_of(value) for key, value in mapping.items()},
            {key: numpy_of(value) for key, value in wanted.items()},
        )


def test_the_mapping_as_it_stands_is_the_peers() -> None:
    pack, images = make_pack()
    assert_same(to_arrays(pack, images, Conversion()), assemble(pack, images))


@pytest.mark.parametrize("strict", [True, False])
def test_a_pack_without_images_has_empty_pixels_or_no_keys_at_all(strict: bool) -> None:
    pack, _ = make_pack(patchified_vae_latent_shapes=[], **({"all_keys": True} if strict else {}))
    pack.image_shapes, pack.vae_images, pack.vit_images = [], [], []
    for choice in choices():
        on_device = DeviceTensors(choice, PlainDevice(torch.device("cpu")))
        mappings = [CpuTensors(choice).convert(pack, []), on_device.convert(pack, [])[0]]
        for mapping in mappings:
            assert (choice.vae_key in mapping, choice.vit_key in mapping) == (strict, strict)
        assert_same(*({key: numpy_of(value) for key, value in mapping.items()} for mapping in mappings))


@pytest.mark.parametrize("choice", choices(), ids=str)
def test_nothing_in_a_mapping_refers_to_the_ring_or_to_another_part_of_it(choice: Conversion) -> None:
    pack, images = make_pack()
    for source in (images, as_floats(pack, images)) if choice.normalise else (images,):
        sources = [*source, *pack.arrays.values()]
        on_device = DeviceTensors(choice, PlainDevice(torch.device("cpu")))
        for mapping in (CpuTensors(choice).convert(pack, source), on_device.convert(pack, source)[0]):
            tensors = [
                item
                for value in mapping.values()
                for item in (value if isinstance(value, list) else [value])
                if isinstance(item, torch.Tensor)
            ]
            assert len(tensors) > 10
            arrays = [numpy_of(tensor) for tensor in tensors]
            for array, other in itertools.combinations(arrays, 2):
                assert not np.may_share_memory(array, other)
            assert not any(np.may_share_memory(array, other) for array in arrays for other in sources)
            assert all(tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize("normalisation", [HALF, CLIP])
def test_torch_gives_every_value_of_a_byte_the_bits_that_numpy_gives(normalisation: Any) -> None:
    """Of plain arithmetic too: what users do themselves with normalise=False."""
    rgb = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    mean, std = (np.array(part, np.float32) for part in normalisation)
    by_numpy = (rgb.astype(np.float32) / np.float32(255) - mean) / std
    by_torch = (torch.from_numpy(rgb).float() / 255 - torch.from_numpy(mean)) / torch.from_numpy(std)
    assert by_torch.numpy().tobytes() == by_numpy.tobytes()
    tensors = DeviceTensors(Conversion(), PlainDevice(torch.device("cpu")))
    assert tensors._floats(torch.from_numpy(rgb), normalisation).numpy().tobytes() == by_numpy.tobytes()


# ---- what is refused


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"normalise": False}, r"cannot be padded; got normalise=False with pad=True.*Fix: pass pad=False"),
        (
            {"normalise": False, "pad": False, "dtype": "float32"},
            "stay uint8; got normalise=False with dtype",
        ),
        ({"dtype": "int8"}, r"no float type.*got 'int8'; expected float32, bfloat16, float16 or float64"),
        ({"dtype": torch.uint8}, "got 'uint8'"),
        ({"pad": "yes"}, "pad must be True or False; got 'yes'"),
        ({"masks": None}, "masks must be True or False"),
        ({"device": "gpu"}, "device is not understood; got 'gpu'"),
        ({"device": object()}, "device is not understood"),
    ],
)
def test_choices_that_make_no_sense_are_refused_when_the_loader_is_made(
    choice: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        PackedLoader(".", rank=0, world_size=1, **choice)


def test_bfloat16_is_refused_where_there_is_none() -> None:
    with pytest.raises(SpecError, match="NumPy has no bfloat16"):
        NumpyReader(".", rank=0, world_size=1, conversion=Conversion("bfloat16"))


@pytest.mark.parametrize(
    "place",
    [{}, {"step": -1}, {"step": 1, "position": 2}, {"step": 1.0}, {"step": 10**12}, {"position": 10**15}],
    ids=str,
)
def test_a_place_that_no_run_has_is_refused_before_anything_is_asked(place: dict[str, Any]) -> None:
    reader = NumpyReader(".", rank=0, world_size=1)
    with pytest.raises(SpecError, match=r"step or a position.*from 0 to below 1000000000000"):
        reader.resume(**place)


def test_bytes_are_refused_where_the_ring_has_floats() -> None:
    pack, images = make_pack()
    choice = Conversion(normalise=False, pad=False)
    floats = as_floats(pack, images)
    for convert in (
        CpuTensors(choice).convert,
        DeviceTensors(choice, PlainDevice(torch.device("cpu"))).convert,
    ):
        with pytest.raises(SpecError, match=r"finished floats, not bytes.*pixelFormat: uint8"):
            convert(pack, floats)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA has the device")
def test_a_cuda_device_that_is_not_there_is_said_when_the_loader_is_made() -> None:
    with pytest.raises(SpecError, match=r"device is not there; got cuda:0.*torch with CUDA"):
        PackedLoader(".", rank=0, world_size=1, device="cuda:0")


# ---- devices


def test_cuda_has_a_queue_of_its_own_and_all_else_copies_plainly() -> None:
    assert isinstance(open_device(torch.device("cuda", 1)), CudaDevice)
    assert isinstance(open_device(parse_device("meta")), PlainDevice)


class FakeRuntime:
    """CUDA's runtime as far as memory is registered with it; `code` is its answer to everything."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802
        self.calls.append(("register", *arguments, threading.current_thread() is threading.main_thread()))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unregister", address))
        return self.code


@pytest.mark.parametrize("code", [0, 801])
def test_cuda_is_asked_to_register_memory_to_be_read_on_a_thread_that_ends(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeRuntime(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CudaError", RuntimeError)
    device = CudaDevice(torch.device("cuda", 0))
    for call in (lambda: device.register(4096, 8192), lambda: device.unregister(4096)):
        with pytest.raises(RuntimeError, match="801") if code else contextlib.nullcontext():
            call()
    assert runtime.calls == [("register", 4096, 8192, 8, False), ("unregister", 4096)]


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
@pytest.mark.parametrize("shape", [(0,), (7,), (4, 5, 3)])
def test_a_tensor_over_an_array_that_cannot_be_written_lies_in_its_memory(
    dtype: type, shape: tuple[int, ...]
) -> None:
    array = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    array.flags.writeable = False
    tensor = tensor_over(array)
    assert tensor.numpy().tobytes() == array.tobytes()
    assert (tensor.numpy().dtype, tuple(tensor.shape)) == (array.dtype, array.shape)
    assert array.size == 0 or tensor.data_ptr() == array.ctypes.data
