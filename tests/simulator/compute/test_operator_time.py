"""The time of one operator comes from measured shapes where a device has some, and is never less than the shortest of
them."""

from dataclasses import replace
from math import log2

import pytest

from meshwright.cluster.catalog import find_entry
from meshwright.cluster.cluster import Device, OperatorTime
from meshwright.dtypes import Dtype
from meshwright.profile.values import BatchPolynomial, Operator
from meshwright.simulator.compute.lookup import bias_bytes, classify_operator
from meshwright.simulator.compute.operator_time import device_speeds, operator_s, reference_gpu
from meshwright.simulator.runtime import OUR_RUNTIME


def _fixed(*sizes: float) -> tuple[BatchPolynomial, ...]:
    return tuple(BatchPolynomial(size, 0.0) for size in sizes)


def _operator(
    kind: str, name: str, shape: tuple[BatchPolynomial, ...], flops: float, moved: float, dtype: str
) -> Operator:
    return Operator("", name, kind, dtype, BatchPolynomial(flops, 0.0), BatchPolynomial(moved, 0.0), shape)  # type: ignore[arg-type]


def _product(m: float, n: float, k: float, dtype: str = "bfloat16") -> Operator:
    size = 4 if dtype == "float32" else 2
    return _operator("matmul", "mm", _fixed(1, m, n, k), 2 * m * n * k, size * (m * k + k * n + m * n), dtype)


def _device(*rows: tuple[str, tuple[int, ...], float, float]) -> Device:
    operators = tuple(
        OperatorTime(operator=name, dtype="fp32", shape=shape, flops=0, bytes=moved, seconds=seconds)  # type: ignore[arg-type]
        for name, shape, moved, seconds in rows
    )
    return Device(
        name="one", kind="cuda", memory_bytes=1, bandwidth_bytes_per_s=1e9, rates={"fp32": 1e12}, operators=operators
    )


def test_between_two_measured_sizes_the_slowdown_is_interpolated() -> None:
    device = _device(("elementwise", (1,), 1e6, 2e-3), ("elementwise", (1,), 4e6, 16e-3))
    prices = device_speeds(device, "fp32")
    times_s = [
        operator_s(_operator("elementwise", "relu", _fixed(1), 0, moved, "float32"), 1, prices, False)
        for moved in (1e6, 2e6, 4e6, 64e6, 1e3)
    ]
    assert times_s[0] == pytest.approx(2e-3)
    assert times_s[1] == pytest.approx(2e-3 * 8**0.5)  # slowdowns of 2 and 4, in logarithms
    assert times_s[2] == pytest.approx(16e-3)
    assert times_s[3] == pytest.approx(16 * 16e-3)  # beyond the measured sizes the last slowdown holds
    assert times_s[4] == 2e-3  # no time is shorter than the shortest measured one


def test_tensors_changed_in_place_are_also_read() -> None:
    fresh = classify_operator(_operator("elementwise", "relu", _fixed(1e6), 0, 8e6, "float32"), 1, 1.0, False)
    inplace = classify_operator(_operator("elementwise", "relu_", _fixed(1e6), 0, 4e6, "float32"), 1, 1.0, False)
    filled = classify_operator(_operator("elementwise", "bernoulli_", _fixed(1e6), 0, 4e6, "float32"), 1, 1.0, False)
    assert fresh is not None
    assert inplace is not None
    assert filled is not None
    assert fresh.bytes == inplace.bytes == 8e6
    assert filled.bytes == 4e6
    assert classify_operator(_operator("copy", "empty_like", _fixed(1e6), 0, 8e6, "float32"), 1, 1.0, False) is None


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("reduction", "_log_softmax_backward_data", "log_softmax"),
        ("reduction", "_softmax", "softmax"),
        ("elementwise", "gelu_backward", "gelu"),
        ("elementwise", "native_dropout", "dropout"),
        ("reduction", "nll_loss_forward", "loss"),
        ("reduction", "max_pool2d_with_indices", "pooling"),
        ("reduction", "sum", "reduction"),
        ("copy", "clone", "copy"),
        ("copy", "_to_copy", "elementwise"),
        ("norm", "native_layer_norm", "norm"),
        ("norm", "native_batch_norm", "batch_norm"),
    ],
)
def test_operators_are_classified_by_kind_and_name(kind: str, name: str, expected: str) -> None:
    operator_class = classify_operator(_operator(kind, name, _fixed(10), 0, 2400, "float32"), 1, 1.0, False)
    assert operator_class is not None
    assert operator_class.name == expected


def test_casts_to_wider_types_are_a_class_of_their_own() -> None:
    def name(dtype: str, moved: float) -> str:
        operator_class = classify_operator(_operator("copy", "_to_copy", _fixed(100), 0, moved, dtype), 1, 1.0, False)
        assert operator_class is not None
        return operator_class.name

    assert name("bfloat16", 600) == "widen"
    third = _operator("copy", "_to_copy", (BatchPolynomial(0.0, 1000 / 3),), 0, 1, "bfloat16")
    divided = classify_operator(replace(third, bytes=BatchPolynomial(0.0, 6000).scaled(1 / 3)), 7, 1.0, False)
    assert divided is not None
    assert divided.name == "widen"
    assert name("float32", 600) == "elementwise"
    assert name("bfloat16", 400) == "elementwise"


@pytest.mark.parametrize("name", ["native_dropout", "gelu", "_softmax"])
def test_a_class_that_a_calibration_lacks_is_substituted_by_the_most_similar_one(name: str) -> None:
    """Older calibrations do not have these classes."""
    operator = _operator("elementwise", name, _fixed(1e6), 0, 8e6, "float32")
    operator_class = classify_operator(operator, 1, 1.0, False)
    assert operator_class is not None
    substitute = "log_softmax" if operator_class.name == "softmax" else "elementwise"
    old, new = (_device((kind, (1,), 8e6, 5e-3)) for kind in (substitute, operator_class.name))
    assert operator_s(operator, 1, device_speeds(old, "fp32"), False) == pytest.approx(5e-3)
    both = _device((substitute, (1,), 8e6, 5e-3), (operator_class.name, (1,), 8e6, 7e-3))
    assert operator_s(operator, 1, device_speeds(both, "fp32"), False) == pytest.approx(7e-3)
    assert operator_s(operator, 1, device_speeds(new, "fp32"), False) == pytest.approx(5e-3)


def test_measurements_of_the_device_itself_are_used() -> None:
    """That is so even where dropout took less time than ReLU."""
    operator = _operator("elementwise", "native_dropout", _fixed(1e6), 0, 8e6, "float32")
    device = _device(("elementwise", (1,), 8e6, 5e-3), ("dropout", (1,), 8e6, 3e-3))
    assert operator_s(operator, 1, device_speeds(device, "fp32"), False) == pytest.approx(3e-3)


def test_the_channels_follow_from_the_bytes_that_do_not_grow_with_the_batch() -> None:
    norm = Operator(
        "",
        "native_batch_norm",
        "norm",
        "float32",
        BatchPolynomial(0, 0),
        BatchPolynomial(24.0 * 64, 8000.0),
        (BatchPolynomial(0, 1000),),
    )
    operator_class = classify_operator(norm, 10, 1.0, False)
    assert operator_class is not None
    assert operator_class.sizes[1] == log2(64)


def test_products_with_misaligned_rows_are_far_slower_on_tensor_cores() -> None:
    prices = device_speeds(reference_gpu()[0], "bf16")
    even, odd = (operator_s(_product(16000, n, 800), 1, prices, False) for n in (50304, 50257))
    assert 4 < odd / even < 12
    growing = Operator(
        "",
        "mm",
        "matmul",
        "bfloat16",
        BatchPolynomial(0, 2.0 * 800 * 800),
        BatchPolynomial(0, 3200.0),
        (BatchPolynomial(1, 0), BatchPolynomial(0, 1), BatchPolynomial(800, 0), BatchPolynomial(800, 0)),
    )
    one_more = [operator_s(growing, batch, prices, False) for batch in (16000, 16001)]
    assert one_more[0] == pytest.approx(one_more[1], rel=0.01)  # the number of rows need not be aligned


def _with_batch_dim(product: Operator, inner: bool, gradient: bool) -> Operator:
    """Returns the product with the samples as its inner dim or as its rows."""
    shape = list(product.shape)
    dim = 3 if inner else 1
    shape[dim] = BatchPolynomial(0.0, product.shape[dim].constant)
    return replace(product, shape=tuple(shape), computes_gradient=gradient)


@pytest.mark.parametrize(
    ("gpu", "dtype", "inputs", "weights"),
    [
        ("H100", "tf32", (1.02, 1.3), (1.4, 1.8)),
        ("A100-80GB", "tf32", (0.99, 1.01), (0.99, 1.01)),
        ("H100", "bf16", (0.95, 1.1), (0.95, 1.1)),
    ],
)
def test_only_hopper_computes_gradients_of_strided_operands_slower_in_tf32(
    gpu: str, dtype: Dtype, inputs: tuple[float, float], weights: tuple[float, float]
) -> None:
    prices, plain = (
        device_speeds(find_entry(gpu).device, dtype),
        _product(4096, 4096, 4096, {"bf16": "bfloat16"}.get(dtype, "float32")),
    )

    def slowdown(product: Operator) -> float:
        product_s, plain_s = (operator_s(operator, 1, prices, True, dtype == "tf32") for operator in (product, plain))
        return product_s / plain_s

    assert inputs[0] < slowdown(_with_batch_dim(plain, inner=False, gradient=True)) < inputs[1]
    assert weights[0] < slowdown(_with_batch_dim(plain, inner=True, gradient=True)) < weights[1]
    # Operators that are recomputed in a backward pass have the memory layout of the forward pass.
    assert slowdown(_with_batch_dim(plain, inner=False, gradient=False)) == pytest.approx(1.0)


def test_convolutions_of_fp32_use_tf32_only_under_runtimes_that_allow_it() -> None:
    device, convolution = find_entry("A100-80GB").device, _convolution(256, 3, "float32")
    without_tf32, with_tf32 = (device_speeds(device, "fp32", tf32_convolutions=is_on) for is_on in (False, True))
    tf32_s = operator_s(convolution, 1, with_tf32, False)
    assert operator_s(convolution, 1, without_tf32, False) > 2 * tf32_s
    assert operator_s(convolution, 1, without_tf32, False, tf32=True) == pytest.approx(tf32_s, rel=0.3)
    assert not OUR_RUNTIME.tf32_convolutions, "parallel/precision.py turns tf32 off"


def test_a_bias_is_recognized_by_the_bytes_of_a_convolution() -> None:
    shape = _fixed(8, 16, 32, 32, 24, 3, 1, 1)
    image, filters, out = 8 * 16 * 1024, 24 * 16 * 9, 8 * 24 * 1024
    flops = 2.0 * out * 16 * 9
    for back, moved, gradients in ((False, image + filters + out, 1), (True, 2 * image + 2 * filters + out, 2)):
        bare, biased = (
            _operator("convolution", "convolution", shape, flops * gradients, 2.0 * (moved + bias), "bfloat16")
            for bias in (0, 24)
        )
        assert bias_bytes(bare, 1, back) == 0
        assert bias_bytes(biased, 1, back) == 2.0 * out * (1 if back else 2)
        prices = device_speeds(reference_gpu()[0], "bf16")
        assert operator_s(biased, 1, prices, back) > operator_s(bare, 1, prices, back)


def test_a_gpu_without_a_calibration_is_scaled_from_the_reference() -> None:
    uncalibrated = find_entry("A100-80GB").device
    product = _product(8192, 8192, 8192)
    ratio = operator_s(product, 1, device_speeds(uncalibrated, "bf16"), False) / operator_s(
        product, 1, device_speeds(reference_gpu()[0], "bf16"), False
    )
    datasheet_ratio = reference_gpu()[1].rates["bf16"] / uncalibrated.rates["bf16"]
    assert ratio == pytest.approx(datasheet_ratio, rel=0.1)


def test_measured_rates_are_not_reduced_like_those_of_a_datasheet() -> None:
    reference, product = reference_gpu()[0], _product(8192, 8192, 8192)
    quick = reference.model_copy(
        update={"operators": (), "sources": dict.fromkeys(("rates", "bandwidth_bytes_per_s"), "measured: here")}
    )
    calibrated, measured = (
        operator_s(product, 1, device_speeds(device, "bf16"), False) for device in (reference, quick)
    )
    assert measured == pytest.approx(calibrated, rel=0.01)


def test_channels_last_convolutions_are_faster_on_tensor_cores() -> None:
    shape = _fixed(64, 128, 56, 56, 128, 3, 1, 1)
    moved = 2.0 * (2 * 64 * 128 * 56 * 56 + 128 * 128 * 9)
    operator = _operator("convolution", "convolution", shape, 2.0 * 64 * 56 * 56 * 128 * 128 * 9, moved, "bfloat16")
    device = reference_gpu()[0]
    slow, fast = (
        operator_s(operator, 1, device_speeds(device, "bf16", 1, layout), False)
        for layout in ("contiguous", "channels_last")
    )
    assert fast < slow


def _convolution(channels: int, kernel: int, dtype: str) -> Operator:
    """Returns a convolution of 32 images of 28 × 28."""
    size, pixels = (4 if dtype == "float32" else 2), 32 * 28 * 28
    flops = 2 * pixels * channels**2 * kernel**2
    moved = size * (2 * pixels * channels + channels**2 * kernel**2)
    shape = _fixed(32, channels, 28, 28, channels, kernel, 1, 1)
    return _operator("convolution", "convolution", shape, flops, moved, dtype)


def test_convolutions_in_fp32_exceed_the_fp32_rate_on_gpus_without_tf32() -> None:
    prices = device_speeds(find_entry("V100-16GB").device, "fp32")
    convolution = _convolution(256, 3, "float32")
    rate = convolution.flops.at(1) / operator_s(convolution, 1, prices, False)
    assert prices.rates["fp32"] < rate < 2.25 * prices.rates["fp32"], "Winograd's algorithm multiplies less"


def test_a_type_that_a_device_only_stores_is_computed_in_fp32() -> None:
    pascal = find_entry("TitanXp").device
    slow = pascal.model_copy(update={"rates": {**pascal.rates, "fp16": pascal.rates["fp32"]}})
    half, whole = (_convolution(256, 3, dtype) for dtype in ("float16", "float32"))
    prices = device_speeds(slow, "fp16")
    assert operator_s(half, 1, prices, False) == pytest.approx(operator_s(whole, 1, prices, False), rel=0.05)


def test_batch_norm_in_fp16_is_faster_than_in_bf16() -> None:
    reference, _ = reference_gpu()
    moved = 2.0 * 2 * 64 * 256 * 56 * 56
    half, brain = (
        _operator("norm", "native_batch_norm", _fixed(1), 0, moved, dtype) for dtype in ("float16", "bfloat16")
    )
    prices = device_speeds(reference, "bf16")
    assert operator_s(half, 1, prices, False) < 0.8 * operator_s(brain, 1, prices, False)


def _batch_norm_slowdown(device: Device, channels: int, layout: str = "contiguous") -> float:
    """Returns how many times as long as on the reference a BatchNorm of 200 MB of images in fp16 takes."""
    vectors = 24.0 * channels  # bytes that do not grow with the batch
    norm = Operator(
        "",
        "native_batch_norm",
        "norm",
        "float16",
        BatchPolynomial(0, 0),
        BatchPolynomial(vectors, 2e8),
        (BatchPolynomial(0, 1e8),),
    )
    device_s, reference_s = (
        operator_s(norm, 1, device_speeds(gpu, "fp16", 1, layout), False) for gpu in (device, reference_gpu()[0])
    )
    return device_s / reference_s


def test_a_batch_norm_of_few_channels_is_limited_by_multiprocessors_not_by_memory() -> None:
    """One block of threads works on one channel, so the lower memory bandwidth of an H100 than that of an H200 makes no
    difference."""
    volta, hopper = (find_entry(name).device for name in ("V100-16GB", "H100"))
    bandwidth_ratio = find_entry("H200").device.bandwidth_bytes_per_s / hopper.bandwidth_bytes_per_s
    assert _batch_norm_slowdown(hopper, 64) == pytest.approx(1.0, abs=0.01), "as many multiprocessors, as fast"
    assert _batch_norm_slowdown(volta, 64) == pytest.approx(1.98 / 1.53, rel=0.1), (
        "enough multiprocessors, at a lower clock"
    )
    assert 2 < _batch_norm_slowdown(volta, 128) < 2.6, "132 multiprocessors have one channel each, 80 have 1.6"
    assert 3 < _batch_norm_slowdown(volta, 2048) < 4, "the memory, 5.3 times slower, limits more than there"
    assert _batch_norm_slowdown(hopper, 64, "channels_last") == pytest.approx(bandwidth_ratio, rel=0.1), (
        "blocks work on rows there"
    )
    without_multiprocessors = hopper.model_copy(update={"multiprocessors": 0})
    assert _batch_norm_slowdown(without_multiprocessors, 64) == pytest.approx(bandwidth_ratio, rel=0.1)


def test_dropout_is_limited_by_arithmetic_or_by_memory_whichever_is_slower() -> None:
    """On the reference dropout takes 1.3 times as long as ReLU for as many bytes, because arithmetic limits it. An H100
    has as much arithmetic and less memory bandwidth, so memory limits it there; arithmetic limits it on an A100."""

    def seconds(name: str, device: Device) -> float:
        operator = _operator("elementwise", name, _fixed(2e8), 0, 1e9, "bfloat16")
        return operator_s(operator, 1, device_speeds(device, "bf16"), False)

    hopper, ampere, volta = (find_entry(name).device for name in ("H100", "A100-80GB", "V100-16GB"))
    reference = reference_gpu()[0]
    assert seconds("native_dropout", reference) > 1.1 * seconds("relu", reference)
    assert seconds("native_dropout", hopper) == pytest.approx(seconds("relu", hopper), rel=0.02)
    arithmetic_ratio = 132 * 1.98 / (108 * 1.41)
    assert seconds("native_dropout", ampere) == pytest.approx(
        arithmetic_ratio * seconds("native_dropout", reference), rel=0.02
    )
    assert seconds("native_dropout", volta) == pytest.approx(seconds("relu", volta), rel=0.02)
    assert seconds("gelu", ampere) > seconds("native_dropout", ampere), "a third of the reference's fp32"


def test_published_sustained_rates_of_a_gpu_are_used_before_those_of_the_reference() -> None:
    sustained, datasheet = (device.rates["bf16"] for device in reference_gpu())
    hopper, ampere, volta = (
        device_speeds(find_entry(name).device, "bf16") for name in ("H100", "A100-80GB", "V100-32GB")
    )
    assert hopper.rates["bf16"] == pytest.approx(0.706 * find_entry("H100").device.rates["bf16"])
    assert ampere.rates["bf16"] == pytest.approx(sustained / datasheet * find_entry("A100-80GB").device.rates["bf16"])
    assert volta.rates["fp32"] == pytest.approx(0.87 * find_entry("V100-32GB").device.rates["fp32"])
    assert device_speeds(reference_gpu()[0], "bf16").rates["bf16"] == sustained, "measured rates are not scaled"


def test_batched_products_with_odd_sides_are_as_much_slower_as_plain_ones() -> None:
    def seconds(width: int) -> float:
        shape, flops = _fixed(32, 2048, 2048, width), 32 * 2 * 2048**2 * width
        moved = 32 * 2 * (2 * 2048 * width + 2048**2)
        return operator_s(_operator("matmul", "bmm", shape, flops, moved, "float16"), 1, prices, False)

    prices = device_speeds(find_entry("A100-80GB").device, "fp16")
    assert seconds(225) > 3 * seconds(224)
    assert seconds(232) == pytest.approx(seconds(224), rel=0.1)
